"""Flow matching with an average of the weights, and a loop that clips gradients by hand."""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Adamax, Optimizer

from conformance.subjects import LoopConfig, own_loop

DIM, WIDTH, POINTS = 4, 20, 6
Cloud = dict[str, Tensor]


class Velocity(nn.Module):
    """Network on points that attend to each other; gives a velocity for each."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(DIM + 1, WIDTH)
        self.attentions = nn.ModuleList(nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.outputs = nn.Linear(WIDTH, DIM)

    def forward(self, points: Tensor, time: Tensor) -> Tensor:
        """Return velocities of the shape of `points`, (clouds, POINTS, DIM), at a time for each cloud."""
        times = time[:, None, None].expand(-1, points.shape[1], 1)
        x = self.inputs(torch.cat([points, times], -1).to(self.inputs.weight.dtype))
        for attention, norm in zip(self.attentions, self.norms, strict=True):
            y = norm(x)
            x = x + attention(y, y, y, need_weights=False)[0]
        return cast("Tensor", self.outputs(F.gelu(x)))


def flow_loss(model: nn.Module, cloud: Cloud) -> Tensor:
    """Return the error of the velocity, summed over all coordinates."""
    time = cloud["time"][:, None, None]
    between = (1 - time) * cloud["noise"] + time * cloud["points"]
    velocity = model(between, cloud["time"])
    return F.mse_loss(velocity.float(), (cloud["points"] - cloud["noise"]).float(), reduction="sum")


def clouds(generator: torch.Generator) -> Cloud:
    """Return points, noise, and times."""
    points, noise = (torch.randn(3, POINTS, DIM, generator=generator) for _ in range(2))
    return {"points": points, "noise": noise, "time": torch.rand(3, generator=generator)}


def coordinates(cloud: Cloud) -> int:
    """Return the number of errors over which the loss is a mean."""
    return cloud["points"].numel()


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Adamax."""
    return Adamax(parameters, lr=1e-3)


@own_loop(
    model=Velocity,
    loss=flow_loss,
    batch=clouds,
    count=coordinates,
    optimizer=make_optimizer,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def train(config: LoopConfig) -> Iterator[float]:
    """Train, and average the weights of each rank's shards after each step."""
    model = cast("Velocity", config.model())
    options: dict[str, Any] = {"mesh": config.device_mesh(), "mp_policy": config.mixed_precision}
    for attention in model.attentions:
        fully_shard(attention, **options)
    sharded = fully_shard(model, **options)
    optimizer = make_optimizer(model.parameters())
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for steps in config.steps:
        number = torch.tensor(float(sum(map(coordinates, steps))), dtype=torch.float64)
        dist.all_reduce(number)
        total = torch.zeros((), dtype=torch.float64)
        for index, cloud in enumerate(steps):
            sharded.set_requires_gradient_sync(index == len(steps) - 1)
            loss = flow_loss(model, cloud) / float(number)
            (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        clip(list(model.parameters()), config.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                average[name].lerp_(parameter, 0.1)
        dist.all_reduce(total)
        yield float(total)


def full(tensor: Tensor) -> Tensor:
    """Return the full tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip(parameters: list[nn.Parameter], limit: float) -> None:
    """Scale gradients by their norm."""
    squares = torch.stack([full(cast("Tensor", p.grad).square().sum()) for p in parameters])
    factor = (limit / (squares.sum().sqrt() + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        cast("Tensor", parameter.grad).mul_(factor)
