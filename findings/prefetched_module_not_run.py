"""A module that FSDP2 has prefetched in forward and that does not run computes with old weights when it runs later.

`set_modules_to_forward_prefetch` gathers a module's parameters. If forward then leaves the module out, the end of the
next backward frees them, but an evaluation has no backward: they stay gathered, and the next forward that runs the
module takes them, although an optimizer's step or `load_state_dict` has changed the shards.

severity: high
visible: silent
training: an evaluation that leaves out modules (early exit, text without images) before weights change
thread: https://github.com/pytorch/pytorch/pull/137348
law: LIFE-1
avoid: evaluate all modules that are prefetched, or clear the lists: `set_modules_to_forward_prefetch([])`
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
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for module in (*model, model):
    fully_shard(module, mesh=mesh)
model[0].set_modules_to_forward_prefetch([model[1]])
x, got = torch.ones(1, 1), []
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(1.0)
    model(x)
    model[0](x)
    model[1].weight.fill_(2.0)
    got.append(model(x).item())
    model[0](x)
    model.load_state_dict({name: torch.full_like(p, 3.0) for name, p in model.state_dict().items()})
    got.append(model(x).item())
expected = [2.0, 9.0]
if dist.get_rank() == 0:
    print(f"expected outputs after a step, and with loaded weights, of {expected}, got {got}", flush=True)
dist.destroy_process_group()
sys.exit(int(got != expected))
