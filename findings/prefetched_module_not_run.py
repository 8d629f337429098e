"""A module that FSDP2 has prefetched in forward and that does not run computes with old weights when it runs later.

`set_modules_to_forward_prefetch` gathers a module's parameters. If forward then leaves the module out, the end of the
next backward frees them, but an evaluation has no backward: they stay gathered, and the next forward that runs the
module takes them, although an optimizer's step or `load_state_dict` has changed the shards.

severity: high
visible: silent
training: an evaluation that leaves out modules (early exit, text without images) before weights change
thread: https://github.com/pytorch/pytorch/pull/137348
law: none
avoid: evaluate all modules that are prefetched, or clear the lists: `set_modules_to_forward_prefetch([])`
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh


class Layers(nn.Module):
    """Two layers, of which forward runs the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor, *, layers: int) -> torch.Tensor:
        """Return the activations after some layers."""
        x = self.first(x)
        return self.second(x) if layers == 2 else x


dist.init_process_group("gloo")
model = Layers()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for module in (model.first, model.second, model):
    fully_shard(module, mesh=mesh)
model.first.set_modules_to_forward_prefetch([model.second])
x, got = torch.ones(1, 1), []
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(1.0)
    model(x, layers=1)
    model.second.weight.fill_(2.0)
    got.append(model(x, layers=2).item())
    model(x, layers=1)
    model.load_state_dict({name: torch.full_like(p, 3.0) for name, p in model.state_dict().items()})
    got.append(model(x, layers=2).item())
expected = [2.0, 9.0]
if dist.get_rank() == 0:
    print(f"expected outputs after a step, and with loaded weights, of {expected}, got {got}", flush=True)
dist.destroy_process_group()
sys.exit(int(got != expected))
