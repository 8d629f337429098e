"""`DTensor.from_local` with run_check=True compares a tensor with those of ranks that are not in its mesh.

`check_tensor_meta` of torch/distributed/tensor/_collective_utils.py gathers over the default process group. Meshes of
pipeline stages or experts, whose tensors differ, are refused; where only one of them checks, its ranks wait for ever.

severity: low
visible: loud
training: tensors of one stage or expert cannot be checked, or the check hangs
thread: none known
law: none
avoid: leave run_check out on meshes that do not have all ranks
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

dist.init_process_group("gloo")
rank = dist.get_rank()
own = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("stages", "shards"))["shards"]
try:
    tensor = DTensor.from_local(torch.ones(rank + 1, 4), own, [Shard(0)], run_check=True)
    got = f"one of shape {tuple(tensor.shape)}"
except ValueError as error:
    got = repr(error)
print(f"rank {rank}: expected a tensor on a mesh of one rank, got {got}", flush=True)
dist.destroy_process_group()
sys.exit(int(not got.startswith("one")))
