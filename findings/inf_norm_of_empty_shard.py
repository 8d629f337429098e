"""clip_grad_norm_ with the inf-norm raises on a rank whose shard is empty, while the other ranks wait in a reduction.

A parameter with fewer rows than ranks is enough. The maximum of no elements has no identity.

severity: medium
visible: hang
training: the run hangs until the time limit of its process group
thread: none known
law: none
avoid: use the 2-norm, or no parameter with fewer rows than ranks
ranks: 2
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
model = fully_shard(nn.Linear(4, 1, bias=False), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
model(torch.ones(1, 4)).sum().backward()
try:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1000.0, norm_type=float("inf"))
    got, status = f"{norm.full_tensor().item()}", 0
except Exception as error:
    got, status = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}", 1
print(f"rank {dist.get_rank()}: expected the norm 1.0, got {got}", flush=True)
sys.exit(status)
