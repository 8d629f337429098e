"""Regression of quantiles by functions on edges (Kolmogorov-Arnold): splines on a fixed grid, and the pinball loss.

conformance judge splines.py:parallelize
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer, RMSprop

from conformance.subjects import ParallelConfig, subject

INPUTS, WIDTH, KNOTS, SAMPLES = 6, 10, 7, 8
QUANTILES = (0.1, 0.5, 0.9)
Points = dict[str, Tensor]


def points(generator: torch.Generator) -> Points:
    """Return inputs, a target for each, and how much it weighs."""
    x = torch.randn(SAMPLES, INPUTS, generator=generator)
    y = x.square().sum(-1).sqrt() + 0.3 * torch.randn(SAMPLES, generator=generator)
    return {"x": x, "y": y, "weight": torch.rand(SAMPLES, generator=generator) + 0.5}


class Edges(nn.Module):
    """Layer with a function on each edge: a smooth unit, and bumps around the knots of a grid."""

    grid: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("grid", torch.empty(KNOTS), persistent=False)
        self.base = nn.Linear(inputs, outputs, bias=False)
        self.coefficients = nn.Parameter(torch.empty(outputs, inputs, KNOTS))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the grid and the coefficients."""
        self.base.reset_parameters()
        nn.init.normal_(self.coefficients, std=0.1)
        with torch.no_grad():
            self.grid.copy_(torch.linspace(-2, 2, KNOTS))

    def forward(self, x: Tensor) -> Tensor:
        """Return features, (samples, outputs)."""
        bumps = (-(2 * (x[..., None] - self.grid.to(x.dtype))).square()).exp()
        curved = torch.einsum("bik,oik->bo", bumps, self.coefficients)
        features: Tensor = self.base(F.silu(x)) + curved
        return features


class Network(nn.Module):
    """Layers of edges, to the quantiles."""

    def __init__(self) -> None:
        super().__init__()
        widths = (INPUTS, WIDTH, WIDTH, len(QUANTILES))
        self.layers = nn.ModuleList(Edges(*pair) for pair in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """Return a number for each quantile."""
        for layer in self.layers:
            x = layer(x)
        return x


def pinball_loss(model: nn.Module, batch: Points) -> Tensor:
    """Return the loss of all quantiles, summed over weighted samples."""
    errors = batch["y"][:, None] - model(batch["x"])
    levels = torch.tensor(QUANTILES, dtype=errors.dtype, device=errors.device)
    losses = torch.maximum(levels * errors, (levels - 1) * errors).mean(-1)
    return (losses * batch["weight"]).sum()


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return RMSprop with momentum."""
    return RMSprop(parameters, lr=1e-3, momentum=0.8, centered=True, eps=1e-4)


def initialize(model: nn.Module) -> None:
    """Initialise all layers after the model was made on the meta device."""
    for layer in cast("Network", model).layers:
        cast("Edges", layer).reset_parameters()


@subject(
    model=Network,
    loss=pinball_loss,
    batch=points,
    count=lambda batch: float(batch["weight"].sum()),
    optimizer=make_optimizer,
    initialize=initialize,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: Network, mesh: DeviceMesh, config: ParallelConfig) -> Network:
    """Shard each layer, then the rest."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=config.mixed_precision)
    fully_shard(model, mesh=mesh, mp_policy=config.mixed_precision)
    return model
