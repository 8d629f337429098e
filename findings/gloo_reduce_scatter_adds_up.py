"""gloo's reduce-scatter with ReduceOp.AVG gives the sum.

FSDP2 averages gradients this way, unless sums are forced.

severity: high
visible: silent
training: FSDP2's gradients are too large by the number of shards
thread: https://github.com/pytorch/pytorch/issues/162338
law: PAR-1
avoid: upgrade, or set_force_sum_reduction_for_comms(True)
ranks: 2
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
world_size, got = dist.get_world_size(), torch.zeros(2)
try:
    dist.reduce_scatter_tensor(got, torch.full((2 * world_size,), dist.get_rank() + 1.0), op=dist.ReduceOp.AVG)
except (RuntimeError, NotImplementedError) as error:
    print(f"refused: {error}")
    sys.exit(2)
expected = sum(range(1, world_size + 1)) / world_size
print(f"rank {dist.get_rank()}: expected {expected}, got {got.tolist()}")
dist.destroy_process_group()
sys.exit(int((got != expected).any()))
