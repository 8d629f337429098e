"""LBFGS takes each rank's own number for a product of gradients that are pending sums.

Its directions are scaled by `dot`, a pending sum like the gradients, which `add_(..., alpha=...)` makes a number
(torch/optim/lbfgs.py): `item` of a pending DTensor is the rank's own (pytorch#144054).

severity: low
visible: silent
training: replicated parameters, such as norms under sequence parallelism, take wrong directions
thread: https://github.com/pytorch/pytorch/issues/144054
law: OPT-3
avoid: redistribute gradients to the layout of their parameters before the step
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh, curvature = init_device_mesh("cpu", (2,)), torch.tensor([1.0, 2.0, 3.0])
expected = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
weight = nn.Parameter(distribute_tensor(expected.detach().clone(), mesh, [Replicate()]))


def loss(parameter: nn.Parameter, *, is_pending: bool) -> float:
    """Return half of the curved square of a parameter, and set its gradient."""
    here = (parameter.to_local() if is_pending else parameter).detach()
    share = 0.25 + 0.5 * dist.get_rank()
    gradient = curvature * here
    parameter.grad = DTensor.from_local(gradient * share, mesh, [Partial()]) if is_pending else gradient
    return float((gradient * here).sum() / 2)


for parameter in (expected, weight):
    optimizer = torch.optim.LBFGS([parameter], lr=0.5, max_iter=4)
    optimizer.step(lambda p=parameter: loss(p, is_pending=p is weight))
got = weight.to_local().detach()
print(f"rank {dist.get_rank()}: expected {expected.tolist()}, got {got.tolist()}")
status = int(not torch.allclose(got, expected.detach(), atol=1e-4))
dist.destroy_process_group()
sys.exit(status)
