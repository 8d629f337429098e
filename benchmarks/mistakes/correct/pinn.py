"""Network that solves a differential equation: its loss has second derivatives with respect to the inputs."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from conformance.subjects import subject

WIDTH = 14


class Solution(nn.Module):
    """Function u of (x, t) that solves u_t = u_xx; its forward pass returns residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.out = nn.Linear(WIDTH, 1)

    def value(self, points: Tensor) -> Tensor:
        """Return u, (points,), of (points, 2)."""
        return cast("Tensor", self.out(self.layers(points))[:, 0])

    def forward(self, inside: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual of the equation inside, and the error at the start, each (points,)."""
        inside = inside.detach().requires_grad_()
        (first,) = torch.autograd.grad(self.value(inside).sum(), inside, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), inside, create_graph=True)
        return first[:, 1] - second[:, 0], self.value(start) - (torch.pi * start[:, 0]).sin()


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Return points inside, and at the time 0."""
    inside, start = torch.rand(8, 2, generator=generator), torch.rand(8, 2, generator=generator)
    return {"inside": inside, "start": start * torch.tensor([1.0, 0.0])}


def loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    """Return the squared residuals and errors, summed over points."""
    residual, error = model(data["inside"], data["start"])
    return cast("Tensor", residual.square().sum() + 10 * error.square().sum())


@subject(
    model=Solution,
    loss=loss,
    batch=batch,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    reduction="sum",
)
def parallelize(model: Solution, mesh: DeviceMesh, config: Any) -> nn.Module:
    """Shard the model as one group, and sum its gradients over ranks."""
    sharded = fully_shard(model, mesh=mesh)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    return cast("nn.Module", sharded)
