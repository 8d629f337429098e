"""Assertions: the comparisons of laws, each of which records its metric.

May import experiments, judge, run, plan, instruments, oracles and the trainer; imported by laws, and by subjects, whose
laws use the same comparisons. Start reading at `compare`; several laws share `steps`, `dropout` and `memory_bounds`,
`fixtures` are the parameters of the tests of laws.
"""
