"""The last of several backwards reduces gradients twice with FSDP2 if each comes after several forward passes.

`set_requires_gradient_sync(False)` lets gradients wait for a later backward. That backward leaves a layer once for each
forward pass. The first time the layer reduces what has waited, although gradients of the backward itself, which are
complete with the first pass alone, are yet to be added; the second time it reduces these. The sums are right.

severity: low
visible: silent
training: twice the reductions of the step, and one more rounding if gradients are reduced in 16 bits
thread: none known
law: none
avoid: nothing known; the cost is that of one reduction for each layer
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


def reductions(*, passes: int) -> int:
    """Return the number of reduce-scatters of the second of two backwards, which alone reduces."""
    model = nn.Sequential(*(fully_shard(nn.Linear(4, 4), mesh=mesh) for _ in range(3)))
    fully_shard(model, mesh=mesh)
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        losses = [model(torch.ones(2, 4, requires_grad=True)).sum() for _ in range(passes)]
        with CommDebugMode() as mode:
            sum(losses, torch.zeros(())).backward()
    return sum(count for name, count in mode.get_comm_counts().items() if "reduce_scatter" in str(name))


expected, got = reductions(passes=1), reductions(passes=2)
if dist.get_rank() == 0:
    print(f"reduce-scatters: expected {expected} for 3 layers, with two forward passes before each backward got {got}")
dist.destroy_process_group()
sys.exit(int(expected != got))
