"""`clip_grad_norm_` raises for gradients on different meshes, such as those of experts and of the other layers.

The norms of all gradients are stacked into one DTensor, whose operands must be on one mesh. MESH-2 counts it as
refused, since all ranks raise.

severity: medium
visible: loud
training: models whose experts are sharded over a part of the ranks cannot be clipped with torch's function
thread: https://github.com/pytorch/pytorch/issues/180346
law: MESH-2
avoid: clip by a norm of the norms of each mesh, with get_total_norm and clip_grads_with_norm_
ranks: 4
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo")
flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "inner"))
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
fully_shard(model[1], mesh=two["inner"])
fully_shard(model, mesh=flat)
for parameter in model.parameters():
    torch.nn.init.ones_(parameter)
    parameter.grad = parameter.detach().clone()
expected = float(sum(parameter.numel() for parameter in model.parameters())) ** 0.5
try:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    got = norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item()
    is_wrong = abs(got - expected) > 1e-3
except RuntimeError as error:
    got, is_wrong = f"RuntimeError: {str(error).splitlines()[0][:140]}", True
if dist.get_rank() == 0:
    print(f"expected a norm of {expected:.4f}, got {got}", flush=True)
dist.destroy_process_group()
sys.exit(int(is_wrong))
