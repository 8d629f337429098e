"""Script with several tasks: each batch has some of them, and a head may have no sample in a whole step.

Gradients are accumulated over a DataLoader's batches, clipped by torch, and logged with the norm; the learning rate
follows a schedule.
"""

from collections.abc import Iterable, Iterator
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from conformance.subjects import LoopConfig, own_loop

FEATURES, WIDTH, HEADS, SAMPLES = 10, 16, 3, 5
Samples = dict[str, Tensor]


class MultiTask(nn.Module):
    """Trunk with a residual layer, and a head of another size for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.SiLU(), nn.LayerNorm(WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, task + 1) for task in range(HEADS))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the outputs (samples, task + 1) of all heads."""
        x = self.trunk(x)
        x = x + F.silu(self.layer(x))
        return [head(x) for head in self.heads]


def task_loss(model: nn.Module, samples: Samples) -> Tensor:
    """Return the squared errors of each sample's own task, summed."""
    outputs = cast("list[Tensor]", model(samples["x"]))
    losses = [(output - samples["y"][:, : task + 1]).square().mean(1) for task, output in enumerate(outputs)]
    chosen = torch.stack(losses, 1).gather(1, samples["task"][:, None])
    return chosen.sum()


def draw(generator: torch.Generator) -> Samples:
    """Return features, targets, and tasks, of which the last one never occurs."""
    return {
        "x": torch.randn(SAMPLES, FEATURES, generator=generator),
        "y": torch.randn(SAMPLES, HEADS, generator=generator),
        "task": torch.randint(HEADS - 1, (SAMPLES,), generator=generator),
    }


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return SGD."""
    return SGD(parameters, lr=0.05, momentum=0.8)


def make_schedule(optimizer: Optimizer) -> LinearLR:
    """Return a warm-up."""
    return LinearLR(optimizer, start_factor=0.25, total_iters=4)


@own_loop(
    model=MultiTask,
    loss=task_loss,
    batch=draw,
    optimizer=make_optimizer,
    scheduler=make_schedule,
    accumulation="even",
    meshes=["dp2", "hsdp2x2"],
)
def train(config: LoopConfig) -> Iterator[dict[str, Tensor]]:
    """Train over the batches of a DataLoader."""
    torch.manual_seed(0)
    model = MultiTask()
    mesh = config.device_mesh()
    fully_shard(model.trunk, mesh=mesh)
    fully_shard([*model.heads], mesh=mesh)
    sharded = fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters())
    schedule = make_schedule(optimizer)
    loader = DataLoader(TensorDataset(torch.zeros(100, 1)), batch_size=SAMPLES)
    samples, summed = torch.zeros(()), torch.zeros(())
    for index, batch in enumerate(loader):
        is_last = index % config.accumulation == config.accumulation - 1
        sharded.set_is_last_backward(is_last)
        sharded.set_requires_all_reduce(is_last)
        count = torch.tensor(float(len(batch["x"])))
        dist.all_reduce(count)
        loss = task_loss(model, batch)
        (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]
        samples, summed = samples + count, summed + loss.detach()
        if not is_last:
            continue
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(samples)
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(summed)
        yield {"loss": summed / samples, "grad_norm": norm}
        samples, summed = torch.zeros(()), torch.zeros(())
