"""With postponed all-reduces HSDP adds gradients of a module that the last micro-batch leaves out to the next step's.

With `set_requires_all_reduce(False)` a micro-batch leaves sums over the shards, which the last one adds to its own and
reduces over the replicas. A group without gradients of the last micro-batch reduces nothing, and keeps its sums:
the step has no gradient of it, and a later one has both.

severity: high
visible: silent
training: modules that some micro-batches leave out, as layer drop and modality towers do, get gradients of other steps
thread: none known
law: none
avoid: reduce every micro-batch over the replicas, or postpone all reductions by `set_requires_gradient_sync(False)`
ranks: 4
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh


class Residual(nn.Module):
    """Two layers, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor, *, leaves_out: bool) -> torch.Tensor:
        """Return the activations after one or two layers."""
        x = self.first(x)
        return x if leaves_out else x + self.second(x)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Residual()
nn.init.ones_(model.first.weight)
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
for module in (model.first, model.second, model):
    fully_shard(module, mesh=mesh)
got = []
for passes in ((False, True), (False, False)):
    for index, leaves_out in enumerate(passes):
        model.set_requires_all_reduce(index == 1)
        model(torch.ones(1, 2), leaves_out=leaves_out).sum().backward()
    gradient = model.second.weight.grad
    got.append(0.0 if gradient is None else gradient.full_tensor().sum().item())
    model.zero_grad()
expected = [8.0, 16.0]  # each of four weights has a gradient of 2 from each micro-batch that uses it
if dist.get_rank() == 0:
    print(f"expected sums of the second layer's gradients, by step, of {expected}, got {got}", flush=True)
dist.destroy_process_group()
sys.exit(int(got != expected))
