"""Experiments: what ranks do for the laws, each a function with its needs of torch and a typed result.

May import defects, run, plan, instruments, oracles and the trainer. Start reading at `context` (the decorator
`experiment` and the world of a rank), then `training` (the run that leaves a cell's record). Processes without torch
know experiments by name, see `run.experiment`.
"""
