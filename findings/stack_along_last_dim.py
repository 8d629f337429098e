"""torch.stack of sharded DTensors along a negative dimension takes the shards for those of another dimension.

`stack_strategy` (torch/distributed/tensor/_ops/_tensor_ops.py) normalises the dimension by the number of dimensions of
an input, which has one less than the result: with -1 the new dimension is put before the last one, not behind it.

severity: high
visible: silent
training: stacked tensors, such as cosines and sines of rotary embeddings, have another shape and other gradients
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
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
x = torch.arange(8.0).reshape(2, 4)
statuses = []
for dim in (2, -1):
    expected = torch.stack([x, -x], dim)
    shard = distribute_tensor(x, mesh, [Shard(1)])
    got = torch.stack([shard, -shard], dim).full_tensor()
    statuses.append(int(not torch.equal(got, expected)))
    if dist.get_rank() == 0:
        print(f"along dim {dim}: expected {tuple(expected.shape)}, got {tuple(got.shape)}")
dist.destroy_process_group()
sys.exit(max(statuses))
