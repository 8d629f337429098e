"""A hook on the accumulated gradient is called twice in one backward of two calls, if gradients were postponed.

The first of the two calls that backward has passed finds the gradients of the earlier micro-batches, and reduces them
without its own; the second reduces the rest. Sums are right, the hook sees half of one, and ranks communicate twice.

severity: low
visible: silent
training: optimizers that step in such a hook step twice, with a part of the gradient each time
thread: none known
law: LIFE-1
avoid: call a module once for each backward, or step after backward
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
for layer in model:
    nn.init.ones_(layer.weight)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
fully_shard(model[1], mesh=mesh)
fully_shard(model, mesh=mesh)
x, calls = torch.ones(1, 1), []
model[1].weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.full_tensor().item()))
model.set_requires_gradient_sync(False)
model(x).sum().backward()
model.set_requires_gradient_sync(True)
(model(x).sum() + model(x).sum()).backward()
if dist.get_rank() == 0:
    print(f"expected one call with a gradient of [3.0], got {calls}", flush=True)
dist.destroy_process_group()
sys.exit(int(calls != [3.0]))
