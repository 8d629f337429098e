"""Plan of a session: cells, the matrix of laws and cells, and the selection of cases.

May import the trainer's configuration, and nothing else of the project; torch-free. Start reading at `cells` (the axes
of a cell and its id), then `matrix` (cells, laws and profiles of a session). `content` is matrix.yaml as it is
written, `derivation` makes cells of it (with `covering`, `combinations` and `reduction` for covering arrays, and `cost`
for what a cell takes), `ordering` puts them best first, and `lock` reads and writes matrix.lock. `scopes` and `gaps`
say where laws hold, `coverage` what they see. `selection` is the language of `--cells`, `workload` derives the
trainer's configuration of a cell, `substrates` names what a case runs on.
"""
