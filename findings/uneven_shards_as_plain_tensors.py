"""Tensor-parallel modules take plain shards for equal: with uneven ones a collective ends the process on gloo.

`DTensor.from_local` infers the size from each rank's own shard (torch/distributed/tensor/parallel/style.py gives it no
shape); ranks then gather tensors of different sizes.

severity: medium
visible: loud
training: sequences and widths that the ranks do not divide cannot be passed on as plain tensors, the styles' default
thread: https://github.com/pytorch/pytorch/issues/150336
law: none
avoid: use_local_output=False everywhere, or pad
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
linear = parallelize_module(nn.Linear(2, 4, bias=False), mesh, ColwiseParallel(input_layouts=Shard(0)))
rows = 2 - dist.get_rank()
try:
    got = tuple(linear(torch.ones(rows, 2)).shape)
    status = int(got != (3, 2))
except RuntimeError as error:
    got, status = f"{str(error).splitlines()[0][:80]}", 1
print(f"rank {dist.get_rank()}: expected (3, 2), got {got}", flush=True)
dist.destroy_process_group()
sys.exit(status)
