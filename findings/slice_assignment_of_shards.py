"""Assignment to a slice of a DTensor along its sharded dimension writes nothing, without an error.

A slice along a sharded dimension is gathered first, so that `x[1:3]` is no view of `x`, and values written into it are
lost. So are `x[0].zero_()` and `nn.init.zeros_(x[:2])`.

severity: high
visible: silent
training: a padding row is not cleared, a partial initialisation or a mask is not applied
thread: https://github.com/pytorch/pytorch/issues/139735
law: DT-3
avoid: write into `to_local()` on the rank that has the rows, or before the tensor is distributed
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
changes = {
    "x[1:3] = y[1:3]": lambda x, y: x.__setitem__(slice(1, 3), y[1:3]),
    "x[-1] = y[0]": lambda x, y: x.__setitem__(-1, y[0]),
    "x[0].zero_()": lambda x, y: x[0].zero_(),
    "nn.init.zeros_(x[:2])": lambda x, y: torch.nn.init.zeros_(x[:2]),
}
statuses = []
for name, change in changes.items():
    expected, value = torch.arange(1.0, 9.0).view(4, 2), torch.full((4, 2), 9.0)
    shards = distribute_tensor(expected, mesh, [Shard(0)])
    change(expected, value)
    try:
        change(shards, distribute_tensor(value, mesh, [Replicate()]))
        got = shards.full_tensor()[:, 0].tolist()
        statuses.append(int(got != expected[:, 0].tolist()))
    except (RuntimeError, NotImplementedError) as error:
        got = f"refused: {str(error).splitlines()[0][:80]}"
        statuses.append(2)
    if dist.get_rank() == 0:
        print(f"{name}: expected rows {expected[:, 0].tolist()}, got {got}")
dist.destroy_process_group()
sys.exit(1 if 1 in statuses else min(statuses))
