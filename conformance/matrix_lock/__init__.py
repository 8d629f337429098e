"""Tool that derives the cells of matrix.yaml, orders them, and writes matrix.lock.

Start reading at `lock_file`; `derivation` makes the cells of each section, and estimates how long a cell takes.

May import plan, `covering_arrays` and defects. Imported by `cli.lock` alone: a session reads the file, see `plan.lock`.
"""
