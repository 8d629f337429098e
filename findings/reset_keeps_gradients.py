"""`FSDPModule.reset_iter_state` keeps gradients of the iteration that failed: the next one adds them to its own.

The method is documented to discard them, also those of accumulation without synchronisation. It reshards parameters,
and leaves `.grad` of the unsharded ones and `unsharded_accumulated_grad` alone (`FSDPParamGroup._reset_iter_state`).

severity: high
visible: silent
training: the step after a caught exception, such as one for lack of memory, has gradients of two batches
thread: none known
law: API-2
avoid: after an exception build the model again, or load a checkpoint in a new process
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import init_device_mesh

dist.init_process_group("gloo")
if not hasattr(FSDPModule, "reset_iter_state"):
    print("expected a method reset_iter_state, got none", flush=True)
    sys.exit(2)
layer = nn.Linear(1, 1, bias=False)
nn.init.ones_(layer.weight)
model = fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
model.set_requires_gradient_sync(False)
model(torch.full((1, 1), 7.0)).sum().backward()
model.reset_iter_state()
model.zero_grad()
model.set_requires_gradient_sync(True)
model(torch.ones(1, 1)).sum().backward()
expected, got = 1.0, layer.weight.grad.full_tensor().item()
if dist.get_rank() == 0:
    print(f"expected a gradient of {expected}, got {got}: the 7.0 of before the reset count, too", flush=True)
dist.destroy_process_group()
sys.exit(int(got != expected))
