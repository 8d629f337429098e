"""Backward of a parallel nn.Linear raises where an unevenly sharded gradient is redistributed.

A shard without its padding is not contiguous after the exchange (`_maybe_unpad_tensor`, torch/distributed/tensor/
placement_types.py), and nn.Linear takes a view of it. Ranks whose shard is not padded go on and wait.

severity: low
visible: loud
training: sequence lengths that tensor-parallel ranks do not divide cannot be trained in some layouts
thread: https://github.com/pytorch/pytorch/issues/143748
law: TP-1
avoid: pad the sequence to a multiple of the ranks
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
style = ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(1), use_local_output=False)
linear = parallelize_module(nn.Linear(3, 5), mesh, style)
x = distribute_tensor(torch.ones(3, 5, 3), mesh, [Shard(0)])
try:
    linear(x).backward(distribute_tensor(torch.ones(3, 5, 5), mesh, [Shard(1)]))
    got = linear.bias.grad.full_tensor().tolist()
    status = int(got != [15.0] * 5)
except RuntimeError as error:
    got, status = f"{str(error).splitlines()[0][:100]}", 1
if dist.get_rank() == 0:
    print(f"expected {[15.0] * 5}, got {got}")
dist.destroy_process_group()
sys.exit(status)
