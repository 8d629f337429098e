"""distribute_tensor to replicas writes the numbers of the source rank into the tensor that other ranks pass.

`Replicate._make_replicate_tensor` broadcasts into `tensor.detach()`, which shares its memory with the argument; shards
are copies.

severity: low
visible: silent
training: a tensor that a rank keeps besides, such as its own statistics or noise, becomes that of the first rank
thread: none known
law: DT-4
avoid: pass a clone, or src_data_rank=None where ranks hold the same numbers
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
own = torch.full((2,), float(dist.get_rank()))
distribute_tensor(own, mesh, [Replicate()])
expected, got = float(dist.get_rank()), own[0].item()
if dist.get_rank() == 1:
    print(f"expected that rank 1 still has {expected}, it has {got}", flush=True)
status = torch.tensor(int(got != expected))
dist.all_reduce(status)
dist.destroy_process_group()
sys.exit(int(status > 0))
