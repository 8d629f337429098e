"""max, min, argmax and argmin of a DTensor raise on ranks whose shard is empty, while the other ranks wait.

A tensor with fewer rows than ranks is enough. The operator runs on the local shard, and torch has no maximum of no
elements; sums and products of the same tensor are right. From 2.14 on DT-3 sees the same of max_pool2d.

severity: medium
visible: hang
training: the run hangs until the time limit of its process group
thread: none known
law: DT-3
avoid: redistribute to Replicate() first
ranks: 2
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
shards = distribute_tensor(torch.tensor([[3.0, 7.0]]), mesh, [Shard(0)])  # one row: rank 0 has it
try:
    got, status = shards.max().full_tensor().item(), 0
except Exception as error:
    got, status = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}", 1
print(f"rank {dist.get_rank()}: expected the maximum 7.0, got {got}", flush=True)
sys.exit(status)
