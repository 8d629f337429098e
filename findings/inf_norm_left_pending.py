"""The inf-norm that clip_grad_norm_ returns is not reduced: item() gives each rank's own maximum.

The norm is a DTensor with the placement `Partial("max")`. Clipping itself uses the right norm.

severity: medium
visible: silent
training: logged norms, and decisions on them, differ from rank to rank
thread: https://github.com/pytorch/pytorch/issues/166638
law: CLIP-4
avoid: call full_tensor() on the norm
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
model = fully_shard(nn.Linear(4, 4, bias=False), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
gradient = torch.arange(1.0, 17.0).view(4, 4)
model.weight.grad = distribute_tensor(gradient, model.weight.device_mesh, model.weight.placements)
norm = nn.utils.clip_grad_norm_(model.parameters(), 1000.0, norm_type=float("inf"))
print(f"rank {dist.get_rank()}: expected {gradient.max().item()}, got {norm.item()}")
status = int(norm.item() != gradient.max().item())
dist.destroy_process_group()
sys.exit(status)
