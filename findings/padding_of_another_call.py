"""F.pad of a DTensor has the shape of an earlier call with another padding of an equal input.

`constant_pad_nd_strategy` (torch/distributed/tensor/_ops/_matrix_ops.py) is registered without naming the padding as a
static argument, as it is from pytorch#175656 on: the cache of sharding decisions takes the output of the first padding
for that of any other. The local result is right, its DTensor is not.

severity: high
visible: silent
training: sequences and images that are padded by several amounts are cut or moved, or a later operator raises
thread: none known
law: DT-3
avoid: pad local tensors, or let inputs of different padding differ in shape
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.nn.functional import pad

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
x = torch.ones(4, 4)
statuses = []
for padding in ((1, 2), (0, 0, 3, 0)):
    expected, got = pad(x, padding), pad(distribute_tensor(x, mesh, [Replicate()]), padding)
    statuses.append(int(got.shape != expected.shape))
    if dist.get_rank() == 0:
        print(f"padded by {padding}: expected {tuple(expected.shape)}, got {tuple(got.shape)}")
dist.destroy_process_group()
sys.exit(max(statuses))
