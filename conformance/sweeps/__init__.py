"""Sweeps: an interface tried in many layouts, sizes or options, each compared with full tensors or one process.

Start reading at `trials`, the engine: ranks try a case and agree how it ended. `layouts` cuts shards and compares
tensors. `operator_sweep` tries the samples of `operator_table`; `optimizers`, `parallel_styles`, `options` (of FSDP2)
and `dtensor` (redistribution) contain their own samples. Subjects become metrics: they have the names of the API.

May import experiments, `covering_arrays`, run, instruments and the trainer. `assertions.sweeps` judges the outcome.
"""
