"""Backward of F.batch_norm in evaluation ends the process on a rank that has no channels.

DTensor has no strategy for `native_batch_norm_backward`, takes one from its decomposition, and calls the
operator itself on each shard of the channels. The kernel on the CPU dies without channels, of plain tensors as well.

severity: low
visible: loud
training: fine-tuning with frozen statistics dies of SIGFPE where channels do not reach all ranks
thread: none known
law: DT-3
avoid: replicate batch normalisation
ranks: 3
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.functional import batch_norm

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
full = (torch.ones(2, 4, 4), torch.zeros(4), torch.ones(4))
x, mean, variance = (distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in full)
try:
    batch_norm(x.requires_grad_(), mean, variance, training=False).pow(2).sum().backward()
    got, status = "a gradient", 0
except (RuntimeError, NotImplementedError) as error:
    got, status = f"refused: {str(error).splitlines()[0][:80]}", 2
print(f"rank {dist.get_rank()}: expected a gradient, got {got}")
dist.destroy_process_group()
sys.exit(status)
