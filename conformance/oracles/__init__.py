"""Oracles: the expected results of a run, computed from the configuration, and bounds on rounding errors.

`reference` trains in one process, `emulation` also rounds where the ranks of a mesh do, and `tolerance` bounds the
deviation of a run from either. `schedule`, `tp_schedule`, `clip_schedule` and `loss_scale` predict collectives, which
`traffic` adds up; `memory_model` and its `memory_walk` predict memory, `dtype_policy` dtypes and devices.
`torch_versions` has the differences between releases of torch, `documented_optimizers` steps in numpy. An oracle shares
configuration, data, initial weights and modules with the trainer, and repeats everything else.

May import `reference_trainer`, `conformance.bound`, `conformance.memory_segment` and `conformance.torch_release`,
nothing else of the suite: not `instruments`, `laws`, `run`, `judge`, `experiments` or `defects`. Start reading at
`reference` for numbers and at `schedule` for collectives and memory.
"""
