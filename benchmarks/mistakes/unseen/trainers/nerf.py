"""Radiance field with a coarse and a fine network, whose colours are composed along rays; losses are scaled.

    conformance judge nerf.py:train

Own loop with `torch.amp.GradScaler`: gradients are unscaled before they are clipped.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Adam, Optimizer

from conformance.subjects import LoopConfig, own_loop

FREQUENCIES, WIDTH, POINTS, SCALE = 3, 24, 6, 1024.0
ENCODED = 3 * 2 * FREQUENCIES
Rays = dict[str, Tensor]


def encoded(x: Tensor) -> Tensor:
    """Return sines and cosines (..., ENCODED) of coordinates (..., 3)."""
    angles = x[..., None] * (math.pi * 2.0 ** torch.arange(FREQUENCIES)).type_as(x)
    return torch.cat([angles.sin(), angles.cos()], -1).flatten(-2)


class Field(nn.Module):
    """Density and colour of points, by a network that sees its input again half-way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(ENCODED, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH + ENCODED, WIDTH)
        self.density = nn.Linear(WIDTH, 1)
        self.colour = nn.Sequential(nn.Linear(WIDTH + ENCODED, WIDTH // 2), nn.ReLU(), nn.Linear(WIDTH // 2, 3))

    def forward(self, points: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Return densities (rays, POINTS) and colours (rays, POINTS, 3)."""
        x = encoded(points)
        y = F.relu(self.second(F.relu(self.first(x))))
        y = F.relu(self.third(torch.cat([y, x], -1)))
        seen = encoded(directions)[:, None].expand(-1, points.shape[1], -1)
        return F.softplus(self.density(y)).squeeze(-1), self.colour(torch.cat([y, seen], -1)).sigmoid()


def composed(density: Tensor, colour: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """Return the colour of each ray, (rays, 3), and the weights of its points, (rays, POINTS)."""
    width = torch.diff(depth, dim=1, append=depth[:, -1:] + 1.0)
    alpha = 1 - torch.exp(-density * width)
    passed = torch.cumprod(1 - alpha + 1e-6, 1)
    weights = alpha * F.pad(passed, (1, 0), value=1.0)[:, :-1]
    return (weights[..., None] * colour).sum(1), weights


class Renderer(nn.Module):
    """Two fields: the second one is asked at depths that move towards those where the first one is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse, self.fine = Field(), Field()

    def forward(self, origins: Tensor, directions: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """Return the colours of rays by both fields, each (rays, 3)."""
        rough, weights = self.colours(self.coarse, origins, directions, depth)
        centre = (weights * depth).sum(1, keepdim=True) / (weights.sum(1, keepdim=True) + 1e-3)
        return rough, self.colours(self.fine, origins, directions, (depth + centre.detach()) / 2)[0]

    def colours(self, field: nn.Module, origins: Tensor, directions: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """Return colours and weights by one field."""
        density, colour = field(origins[:, None] + depth[..., None] * directions[:, None], directions)
        return composed(density, colour, depth)


def rays(generator: torch.Generator) -> Rays:
    """Return rays with rising depths, and their colours."""
    return {
        "origins": torch.randn(8, 3, generator=generator),
        "directions": F.normalize(torch.randn(8, 3, generator=generator), dim=-1),
        "depth": torch.rand(8, POINTS, generator=generator).cumsum(1),
        "colours": torch.rand(8, 3, generator=generator),
    }


def colour_loss(model: nn.Module, batch: Rays) -> Tensor:
    """Return the squared errors of both renderings, summed over rays."""
    rendered = model(batch["origins"], batch["directions"], batch["depth"])
    return cast("Tensor", sum(F.mse_loss(colour, batch["colours"], reduction="sum") for colour in rendered))


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Adam."""
    return Adam(parameters, lr=5e-4, eps=1e-7)


@own_loop(
    model=Renderer,
    loss=colour_loss,
    batch=rays,
    optimizer=make_optimizer,
    meshes=["dp2", "hsdp2x2"],
)
def train(config: LoopConfig) -> Iterator[dict[str, Any]]:
    """Train with scaled losses; both fields are groups, and the root has no parameter."""
    model = cast("Renderer", config.model())
    mesh = config.device_mesh()
    for field in (model.coarse, model.fine):
        fully_shard(field, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for micro_batches in config.steps:
        number, summed = torch.tensor(float(sum(len(batch["depth"]) for batch in micro_batches))), torch.zeros(())
        dist.all_reduce(number)
        for index, batch in enumerate(micro_batches):
            cast("FSDPModule", model).set_requires_gradient_sync(index == len(micro_batches) - 1)
            loss = colour_loss(model, batch)
            scaler.scale(loss * dist.get_world_size() / number).backward()  # type: ignore[no-untyped-call]
            summed += loss.detach()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        dist.all_reduce(summed)
        yield {"loss": summed / number, "grad_norm": norm}
