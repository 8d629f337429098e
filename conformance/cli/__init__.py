"""Commands of `python -m conformance`: one module for each, named as the command (`list` is `list_cells`).

Each has `add_parser`, with the options and `run`, which answers; `command` has what they share. Start reading at
`conformance/__main__.py`, which only dispatches, or at the module of a command.

May import everything. Torch takes seconds to load, and most commands do without: a module that needs it, such as
`prediction`, is imported inside `run`.
"""
