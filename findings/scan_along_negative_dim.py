"""cumsum and logcumsumexp along a negative dimension that is sharded start again on each rank.

`x.cumsum(-1)` of a DTensor sharded along its last dimension is the sum of each shard alone; `x.cumsum(1)` is right.
`scan_strategy` (torch/distributed/tensor/_ops/_math_ops.py) passes `[dim]` on without normalising it, so that the
sharded dimension is not found among those to be gathered.

severity: high
visible: silent
training: positions, packed sequences and cumulative probabilities are wrong on all ranks but the first
thread: none known
law: DT-3
avoid: give the dimension as a positive number
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh, statuses = init_device_mesh("cpu", (dist.get_world_size(),)), []
full = torch.ones(1, 4)
for name in ("cumsum", "cumprod", "logcumsumexp"):
    for dim in (1, -1):
        expected = getattr(torch, name)(full, dim)
        try:
            got = getattr(torch, name)(distribute_tensor(full, mesh, [Shard(1)]), dim).full_tensor()
            statuses.append(int(not torch.allclose(got, expected)))
        except (RuntimeError, NotImplementedError) as error:
            got = f"refused: {str(error).splitlines()[0][:80]}"
            statuses.append(2)
        if dist.get_rank() == 0:
            print(f"{name} of dim {dim}: expected {expected}, got {got}")
dist.destroy_process_group()
sys.exit(1 if 1 in statuses else min(statuses))
