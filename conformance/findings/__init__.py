"""Findings: faults of released torch, each with a standalone program of `findings/` that shows it.

`programs` reads the programs' docstrings, `execution` runs the programs on the installed torch, `table` shows their
outcomes. None of them imports torch; the programs do, in ranks of `conformance.run`.
"""
