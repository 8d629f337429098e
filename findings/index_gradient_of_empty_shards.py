"""Backward of x[i, j] with sharded indices raises, or is wrong, where there are fewer indices than ranks.

The gradient is written by `index_put`, whose strategy (torch/distributed/tensor/_ops/_tensor_ops.py) shards a dimension
that is indexed: each rank writes all values into its columns, where some indices are out of bounds.

severity: low
visible: loud
training: losses that pick log-probabilities by row and class stop where a batch has fewer rows than ranks
thread: https://github.com/pytorch/pytorch/issues/170934
law: DT-3
avoid: replicate indices, or use gather
ranks: 3
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
full = (torch.arange(9.0).reshape(3, 3), torch.tensor([2, 0]), torch.tensor([1, 2]))
x, i, j = (distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in full)
x.requires_grad_()
try:
    x[i, j].pow(2).sum().backward()
    got, status = "a gradient", 0
except (IndexError, RuntimeError) as error:
    got, status = str(error), 2 if "mixed torch.Tensor" in str(error) else 1
print(f"rank {dist.get_rank()}: expected a gradient, got {got}")
dist.destroy_process_group()
sys.exit(status)
