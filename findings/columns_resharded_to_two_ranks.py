"""FSDP2 cannot gather parameters that are sharded along dimension 1 and resharded after forward to fewer ranks.

With `shard_placement_fn` giving `Shard(1)` and `reshard_after_forward=2` on four ranks, the all-gather in backward
raises IndexError, since the shard that is kept is flat. `reshard_after_forward=True` works.

severity: low
visible: loud
training: the first backward pass raises
thread: none known
law: none
avoid: use reshard_after_forward=True, or Shard(0)
ranks: 4
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

dist.init_process_group("gloo")
mesh, status = init_device_mesh("cpu", (dist.get_world_size(),)), 0
for reshard in (True, 2):
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, shard_placement_fn=lambda _: Shard(1))
    try:
        model(torch.ones(1, 8)).sum().backward()
        got = "a gradient"
    except IndexError as error:
        got, status = repr(error), 1
    if dist.get_rank() == 0:
        print(f"reshard_after_forward={reshard}: expected a gradient, got {got}")
dist.destroy_process_group()
sys.exit(status)
