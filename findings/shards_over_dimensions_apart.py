"""`fully_shard` with `dp_mesh_dims` refuses to shard over dimensions of a mesh that are not neighbours.

`DataParallelMeshDims` is documented to flatten the dimensions it is given. Where another dimension, such as that of
tensor parallelism, lies between them, the layout of the shards is put together from the flattened dimension twice
(`FSDPParam._build_spmd_sharding_spec` skips the next dimensions, whichever they are).

severity: low
visible: loud
training: raises when the model is made
thread: none known
law: API-1
avoid: order the dimensions of the mesh so that those of shards follow each other
ranks: 4
"""

import sys

import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
if not hasattr(fsdp, "DataParallelMeshDims"):
    print("expected a class DataParallelMeshDims, got none", flush=True)
    sys.exit(2)
mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "tp", "cp"))
layer = nn.Linear(4, 8, bias=False)
layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Replicate(), Shard(0), Replicate()]))
got = "none"
try:
    fully_shard(layer, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard=("dp", "cp")))
except RuntimeError as error:
    got = str(error).splitlines()[0]
if dist.get_rank() == 0:
    print(f"expected no error, got {got}", flush=True)
dist.destroy_process_group()
sys.exit(int(got != "none"))
