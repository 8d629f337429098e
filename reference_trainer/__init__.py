"""A small, readable trainer for FSDP2 and tensor parallelism that performs the steps of a real one.

The conformance suite judges its runs, but the trainer knows nothing of the suite: it imports libraries and its own
modules, never `conformance` or `pytest`. `checks`, `config`, `goes_with`, `parallel_dims`, `precision`, `stopwatch`
and `strict_yaml` do without torch, so that processes that never train can read configurations.

Start with `train.py`, whose docstring gives the order in which to read the rest; `parallelize.py` is the heart.
"""
