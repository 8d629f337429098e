"""Findings: faults of released torch, each with a standalone program of `findings/` that shows it.

`execution` runs the programs on the installed torch, `table` reads their docstrings and shows their outcomes. Neither
imports torch; the programs do, in ranks of `conformance.run`.
"""
