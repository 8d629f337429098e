"""Script that learns a vector field from trajectories (neural ODE): steps of Runge and Kutta through one small network.

    torchrun --nproc-per-node 2 trajectories.py
    conformance judge trajectories.py:train

Trajectories have unequal numbers of observations, each of which counts. Gradients are reduced in the last micro-batch.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import NAdam, Optimizer

from conformance.subjects import LoopConfig, own_loop

SIZE, WIDTH, TIMES = 3, 16, 5
Paths = dict[str, Tensor]


def paths(generator: torch.Generator, count: int = 5) -> Paths:
    """Return starts, and positions that were observed at some of the times."""
    return {
        "start": torch.randn(count, SIZE, generator=generator),
        "observed": torch.randn(count, TIMES, SIZE, generator=generator) / 2,
        "is_observed": torch.rand(count, TIMES, generator=generator) < 0.6,
    }


class Field(nn.Module):
    """Vector field that changes with time."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(SIZE + 1, WIDTH)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, SIZE)

    def forward(self, time: float, x: Tensor) -> Tensor:
        """Return the velocity at points."""
        h = self.into(torch.cat([x, torch.full_like(x[:, :1], time)], -1)).tanh()
        for layer in self.hidden:
            h = h + layer(h).tanh()
        velocity: Tensor = self.out(h)
        return velocity


class Flow(nn.Module):
    """Positions at all times, from those at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(SIZE, SIZE)
        self.field = Field()

    def forward(self, start: Tensor) -> Tensor:
        """Return positions, (paths, times, size)."""
        x, step, found = self.encode(start), 0.5, []
        for index in range(TIMES):
            time = index * step
            first = self.field(time, x)
            second = self.field(time + step / 2, x + step / 2 * first)
            third = self.field(time + step / 2, x + step / 2 * second)
            fourth = self.field(time + step, x + step * third)
            x = x + step / 6 * (first + 2 * second + 2 * third + fourth)
            found.append(x)
        return torch.stack(found, 1)


def observed_loss(model: nn.Module, batch: Paths) -> Tensor:
    """Return the error of the positions that were observed, summed."""
    errors: Tensor = (model(batch["start"]) - batch["observed"]).square().mean(-1)
    return (errors * batch["is_observed"].to(errors.dtype)).sum()


def count_observed(batch: Paths) -> float:
    """Return the number of observations."""
    return float(batch["is_observed"].sum())


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return NAdam."""
    return NAdam(parameters, lr=3e-3)


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of gradients whose shards are on all ranks."""
    norms = torch.stack(torch._foreach_norm([gradient.to_local() for gradient in gradients]))  # type: ignore[attr-defined]
    square = norms.square().sum()
    dist.all_reduce(square)
    return square.sqrt()


def accumulate(model: nn.Module, micro_batches: list[Paths], weight: Tensor) -> Tensor:
    """Add up the gradients of micro-batches, which are reduced with the last; returns the summed loss."""
    total = torch.zeros(())
    last = len(micro_batches) - 1
    for index, batch in enumerate(micro_batches):
        model.set_requires_gradient_sync(index == last)  # type: ignore[operator]
        loss = observed_loss(model, batch)
        torch.autograd.backward(loss * weight)
        total += loss.detach()
    return total


def train_steps(
    model: nn.Module, mesh: DeviceMesh, steps: Iterable[list[Paths]], max_norm: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Train; yields loss and norm of each step."""
    assert isinstance(model, Flow)
    fully_shard(model.field, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    parameters = [*model.parameters()]
    optimizer = make_optimizer(parameters)
    for micro_batches in steps:
        observations = torch.tensor(sum(map(count_observed, micro_batches)))
        dist.all_reduce(observations)
        total = accumulate(model, micro_batches, dist.get_world_size() / observations)
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = global_norm(gradients)
        for gradient in gradients:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1))
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        dist.all_reduce(total)
        yield total / observations, norm


@own_loop(model=Flow, loss=observed_loss, batch=paths, count=count_observed, optimizer=make_optimizer)
def train(config: LoopConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Train as the script does."""
    return train_steps(config.model(), config.device_mesh(), config.steps, config.max_norm)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(1 + dist.get_rank())
    data = [[paths(source) for _ in range(2)]] * 8
    for loss, norm in train_steps(Flow(), init_device_mesh("cpu", (dist.get_world_size(),)), data, 1.0):
        print(float(loss), float(norm))
    dist.destroy_process_group()
