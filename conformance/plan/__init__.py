"""Plan of a session: cells, the matrix of laws and cells, and the selection of cases.

May import the trainer's configuration, and nothing else of the project; torch-free. Start reading at `cells` (the axes
of a cell and its id), then `matrix` (families, exclusions and profiles of matrix.yaml). `selection` is the language of
`--cells`, `covering` computes covering arrays, `workload` derives the trainer's configuration of a cell, `substrates`
names what a case runs on.
"""
