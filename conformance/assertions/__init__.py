"""Assertions: what laws compare with, and how each comparison records its metric.

May import experiments, judge, run, plan, instruments, oracles and the trainer; imported by laws, and by subjects, whose
laws compare alike. Start reading at `compare`; `steps`, `dropout` and `memory_bounds` are what several laws share,
`fixtures` what the tests of laws are given.
"""
