"""SequenceParallel returns all rows on every rank, instead of a shard, if there are fewer rows than ranks.

DTensor drops strategies that would leave a rank without elements (`is_tensor_shardable`, torch/distributed/tensor/_ops/
utils.py), and gathers the input; the style returns the gathered rows as its shard, which is wrong with
use_local_output=True.

severity: low
visible: silent
training: the shards of the last ranks are the full sequence, which whatever follows takes for theirs
thread: none known
law: TP-1
avoid: have as many rows as ranks, or use_local_output=False
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
status = 0
for norm in (nn.LayerNorm(4), nn.RMSNorm(4)):
    parallelize_module(norm, mesh, SequenceParallel(sequence_dim=0, use_local_output=True))
    x = distribute_tensor(torch.arange(4.0).view(1, 4), mesh, [Shard(0)])
    got = norm(x)
    status |= int(got.shape != x.to_local().shape)
    print(
        f"rank {dist.get_rank()}, {type(norm).__name__}: expected {tuple(x.to_local().shape)}, got {tuple(got.shape)}"
    )
dist.destroy_process_group()
sys.exit(status)
