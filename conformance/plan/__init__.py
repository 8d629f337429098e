"""Plan of a session: cells, the matrix of laws and cells, and the selection of cases.

Start reading at `cells` (the axes of a cell, its id, and the trainer's configuration, of which `workload` has the
values), then `matrix` (cells, laws and profiles of a session). `content` checks matrix.yaml, `lock` reads matrix.lock,
which `conformance.matrix_lock` derives. `scopes` says where laws hold, `coverage` counts judged combinations of values.
`selection` is the language of `--cells`, `mesh` parses names of meshes, `substrates` names the backends that run a
case.

May import the trainer's configuration and `covering_arrays.combinations`; torch-free.
"""
