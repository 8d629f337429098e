"""FSDP2 reduces gradients in bf16 instead of fp32 if the first forward ran while the module was frozen.

`FSDPParamGroup._init_mp_dtypes` takes the dtype of reductions from the parameters that need gradients at the first
forward. If none does, it is None for ever, and gradients are reduced in the dtype in which they are computed. Where
parameters are fp32 and computed in bf16, backward raises instead.

severity: high
visible: silent
training: a module that is thawed after a validation or a warm-up has gradients that are summed in bf16
thread: https://github.com/pytorch/pytorch/issues/186998
law: LIFE-1
avoid: run the first forward before anything is frozen, or freeze by leaving parameters out of the optimizer
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo")
model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
nn.init.ones_(model.weight)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
model.requires_grad_(False)
with torch.no_grad():
    model(torch.ones(1, 1, dtype=torch.bfloat16))
model.reshard()
model.requires_grad_(True)
# 256 and 1 are bf16 numbers, their mean of 128.5 in fp32 is 128.0 or 129.0 in bf16, their sum of 257 rounds to 256.
x = torch.full((1, 1), 256.0 if dist.get_rank() == 0 else 3.0, dtype=torch.bfloat16)
dtypes = []
original = dist.ReduceOp
with torch.profiler.profile(record_shapes=True) as profile:
    model(x).sum().backward()
for event in profile.events():
    if "reduce_scatter" in event.name and event.name.startswith("c10d::"):
        dtypes.append(event.name)
expected, got = 130.0, model.weight.grad.full_tensor().item()
if dist.get_rank() == 0:
    print(f"expected a gradient of {expected}, got {got}", flush=True)
dist.destroy_process_group()
sys.exit(int(got != expected))
