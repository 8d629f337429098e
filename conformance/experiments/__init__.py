"""Experiments: functions that ranks run on one cell for the laws, each with its needs of torch and a typed result.

Start reading at `context` (the decorator `experiment` and the world of a rank), then `training` (the run that leaves a
cell's record). Processes without torch refer to experiments by name, see `run.experiment`. Trials of an interface in
many layouts or options are sweeps, in `conformance.sweeps`.

May import defects, run, plan, instruments, oracles and the trainer, not sweeps.
"""
