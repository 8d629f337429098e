"""Covering arrays: cheap rows of values in which every possible combination of two or three values occurs.

`combinations` numbers values and decides exactly which combinations rules leave possible; `covering` builds and reduces
arrays. Rows are mappings of axes to values: nothing here knows cells. Start reading at `covering.covering_rows`.

May import `reference_trainer.checks`, nothing else of the project; torch-free. Imported by `plan` (combinations alone,
for coverage), `matrix_lock` and `sweeps`.
"""
