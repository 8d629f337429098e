"""After `no_backward_sync(enabled=False)` Fabric's FSDP2 reduces no gradients: `grad` is None, steps do nothing.

`_FSDPNoSync.__exit__` (lightning/fabric/strategies/model_parallel.py) sets `requires_gradient_sync` to `enabled`, where
it has to set True. The usual loop, in which every backward pass is inside of such a block, does not show it.

package: lightning
severity: high
visible: silent
training: backward passes outside of such a block, such as those of a second loss or phase, train nothing
thread: none known
law: every-gradient
avoid: call set_requires_gradient_sync(True) on the model's FSDP modules after each block
ranks: 2
"""

import os
import sys

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard


def parallelize(model, mesh):
    """Shard the model."""
    return fully_shard(model, mesh=mesh["data_parallel"])


world = int(os.environ["WORLD_SIZE"])
strategy = ModelParallelStrategy(parallelize, data_parallel_size=world, tensor_parallel_size=1)
fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
fabric.launch()
model = fabric.setup_module(torch.nn.Linear(4, 4))
with fabric.no_backward_sync(model, enabled=False):
    fabric.backward(model(torch.ones(2, 4)).sum())
model.zero_grad()
fabric.backward(model(torch.ones(2, 4)).sum())
missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
print(f"rank {dist.get_rank()}: expected gradients of all parameters, got none of {missing}")
dist.destroy_process_group()
sys.exit(int(bool(missing)))
