"""distribute_tensor of integers to Partial holds fp32 numbers, while the DTensor says that they are integers.

`Partial._partition_value` divides by the number of ranks, which makes floating-point numbers of integers.

severity: low
visible: silent
training: indices and counts that are distributed as pending sums are no integers any more, and lose bits from 2**24 on
thread: none known
law: DT-4
avoid: distribute integers to Replicate or Shard
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
try:
    result = distribute_tensor(torch.full((2,), 2**24 + 1), mesh, [Partial()])
except RuntimeError as error:
    print(f"{type(error).__name__}: {str(error)[:100]}", flush=True)
    sys.exit(2)
full = result.full_tensor()
if dist.get_rank() == 0:
    print(f"expected [16777217, 16777217] of {result.dtype}, got {full.tolist()} of {full.dtype}", flush=True)
dist.destroy_process_group()
sys.exit(int(full.dtype != torch.int64))
