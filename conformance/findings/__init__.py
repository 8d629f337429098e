"""Findings: faults of released torch, each with a standalone program of `findings/` that shows it.

`programs` reads what the programs say of themselves, `execution` runs them on the installed torch, `table` shows what
came out. None of them imports torch; the programs do, in ranks of `conformance.run`.
"""
