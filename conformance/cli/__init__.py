"""Commands of `python -m conformance`: one module for each.

Modules are named as the commands; `list` is `list_cells`, and `reports` has `diff`, `html` and `schema`. Each module
has `add_parser`, which declares the options, and `run`, which returns the answer; `command` has shared options and
types, `blocks` edits generated blocks of markdown. Start reading at `conformance/__main__.py`, which only dispatches,
or at the module of a command.

May import everything. Torch takes seconds to load, and most commands do without: `run` imports modules that need it,
such as `sizing.prediction`.
"""
