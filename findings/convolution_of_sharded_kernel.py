"""F.conv2d with input and kernel sharded along the width raises in backward, on one rank alone.

DTensor's convolution (torch/distributed/tensor/_tp_conv.py) exchanges columns with its neighbours and takes it for
granted that the kernel is replicated; a rank whose columns are fewer than the kernel's raises, others go on. On a mesh
of two dimensions that shard batch and channels, the output lacks channels, without an error (DT-3 on hsdp2x2).

severity: low
visible: loud
training: a rank stops, and the others wait for it in the next collective
thread: none known
law: DT-3
avoid: replicate kernels
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn import functional

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
given = [
    distribute_tensor(torch.ones(shape), mesh, [Shard(3)]).requires_grad_() for shape in ((4, 2, 4, 4), (4, 2, 2, 2))
]
try:
    functional.conv2d(*given).sum().backward()
    got = "gradients"
    has_raised = torch.zeros(1)
except RuntimeError as error:
    got, has_raised = f"{str(error).splitlines()[0][:80]}", torch.ones(1)
print(f"rank {dist.get_rank()}: expected the same on all ranks, got {got}", flush=True)
dist.all_reduce(has_raised)
dist.destroy_process_group()
sys.exit(2 if has_raised.item() == mesh.size() else int(has_raised.item() > 0))
