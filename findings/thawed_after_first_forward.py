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
name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
original, reduced = getattr(dist, name), []


def reduce_scatter(*args, **kwargs):
    """Note the dtype."""
    reduced.append(next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)).dtype)
    return original(*args, **kwargs)


setattr(dist, name, reduce_scatter)
model = nn.Linear(8, 8).to(torch.bfloat16)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32), reshard_after_forward=True)
x = torch.ones(2, 8, dtype=torch.bfloat16)
model.requires_grad_(False)
model(x)
model.requires_grad_(True)
model(x).sum().backward()
if dist.get_rank() == 0:
    print(f"expected a reduction of torch.float32, got {reduced[0]}", flush=True)
dist.destroy_process_group()
sys.exit(int(reduced != [torch.float32]))
