"""Fabric leaves buffers of a model on the meta device uninitialised if their module has no `reset_parameters`.

`_materialize_distributed_module` (lightning/fabric/strategies/model_parallel.py) calls `to_empty`, and then
`reset_parameters` of modules that have one. A buffer that `__init__` has computed, such as a table of frequencies, is
whatever was in memory. There is a warning.

package: lightning
severity: medium
visible: loud
training: with a table of positions that is noise, or zero
thread: none known
law: initialised
avoid: give every module that has a buffer a method `reset_parameters` that computes it
ranks: 2
"""

import os
import sys
import warnings

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.use_deterministic_algorithms(True)  # memory is NaN until it is initialised
warnings.simplefilter("ignore")


class Scaled(nn.Linear):
    """Layer with a table that is computed."""

    def __init__(self):
        super().__init__(4, 4)
        self.table = nn.Module()
        self.table.register_buffer("scale", torch.arange(4.0), persistent=False)


strategy = ModelParallelStrategy(lambda model, mesh: fully_shard(model, mesh=mesh["data_parallel"]))
fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
fabric.launch()
with fabric.init_module(empty_init=True):
    model = Scaled()
expected, got = torch.arange(4.0).tolist(), fabric.setup_module(model).table.scale.tolist()
print(f"rank {dist.get_rank()}: expected {expected}, got {got}")
dist.destroy_process_group()
sys.exit(int(got != expected))
