"""Races of any program: the same command under several schedules, and the check of happens-before over its trace.

`exploring.explore` starts the command once for each schedule, in processes that record their trace and all bits that
the host reads; `unordered` finds the pairs of operators that nothing orders, `differences` the bits that a schedule
changes, `smallest` the fewest delayed operators that still change them; `text` writes the report. Nothing here imports
torch.
"""
