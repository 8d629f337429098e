"""nn.init.eye_ of a sharded DTensor gives each rank an identity matrix of full size instead of its rows of one.

`eye_out_strategy` (torch/distributed/tensor/_ops/_tensor_ops.py) runs `eye(n, m, out=shard)` with the global n and m,
which resizes the shard. The DTensor then has rows more often than once, or full_tensor() raises.

severity: medium
visible: silent
training: the initial weight is no identity, or its shards do not fit the optimizer's
thread: none known
law: DT-3
avoid: distribute torch.eye(n, m)
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
weight = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
expected = distribute_tensor(torch.eye(4), mesh, [Shard(0)]).to_local().tolist()
try:
    nn.init.eye_(weight)
    got = weight.to_local().tolist()
    status = int(got != expected)
except (RuntimeError, NotImplementedError) as error:
    got, status = f"refused: {str(error).splitlines()[0][:80]}", 2
print(f"rank {dist.get_rank()}: expected the shard {expected}, got {got}")
dist.destroy_process_group()
sys.exit(status)
