"""Script that learns when an event happens (DeepHit): patients have weights, and some are lost before any event.

    torchrun --nproc-per-node 2 survival.py
    conformance judge survival.py:train

Batches come from a loader, of which each group of some is a step; the learning rate warms up.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from conformance.subjects import LoopConfig, own_loop

CODES, LONGEST, WIDTH, TIMES, RISKS = 20, 6, 16, 8, 2
Patients = dict[str, Tensor]


def patients(generator: torch.Generator, count: int = 6) -> Patients:
    """Return codes of diagnoses, measured values, the time of the last visit, and the event there (-1 for none)."""
    codes = torch.randint(1, CODES, (count, LONGEST), generator=generator)
    ends = torch.randint(1, LONGEST + 1, (count, 1), generator=generator)
    return {
        "codes": codes.masked_fill(torch.arange(LONGEST) >= ends, 0),
        "values": torch.randn(count, 4, generator=generator),
        "time": torch.randint(TIMES, (count,), generator=generator),
        "event": torch.randint(-1, RISKS, (count,), generator=generator),
        "weight": torch.rand(count, generator=generator) + 0.25,
    }


class Risk(nn.Module):
    """Network of one kind of event."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ELU(), nn.Linear(WIDTH, TIMES))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of the times."""
        logits: Tensor = self.layers(x)
        return logits


class DeepHit(nn.Module):
    """Probabilities of all events at all times."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(CODES, WIDTH, padding_idx=0)
        self.values = nn.Linear(4, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.risks = nn.ModuleList(Risk() for _ in range(RISKS))

    def forward(self, codes: Tensor, values: Tensor) -> Tensor:
        """Return logarithms of probabilities, (patients, events, times)."""
        present = (codes != 0).sum(-1, keepdim=True)
        x = self.norm(self.codes(codes).sum(1) / present + self.values(values))
        logits = torch.stack([risk(x) for risk in self.risks], 1)
        return logits.flatten(1).log_softmax(-1).view(len(x), RISKS, TIMES)


def event_loss(model: nn.Module, batch: Patients) -> Tensor:
    """Return the negative logarithm of likelihoods, summed over weighted patients."""
    logs = model(batch["codes"], batch["values"])
    happened = batch["event"] >= 0
    patient = torch.arange(len(logs), device=logs.device)
    known = logs[patient, batch["event"].clamp(min=0), batch["time"]]
    later = torch.arange(TIMES, device=logs.device) >= batch["time"][:, None]
    lost = logs.masked_fill(~later[:, None], float("-inf")).flatten(1).logsumexp(-1)
    return -(torch.where(happened, known, lost) * batch["weight"]).sum()


def weight_of(batch: Patients) -> float:
    """Return the summed weights of patients."""
    return float(batch["weight"].sum())


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Adam with AMSGrad."""
    return Adam(parameters, lr=4e-3, amsgrad=True)


def make_schedule(optimizer: Optimizer) -> LambdaLR:
    """Return a learning rate that warms up."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


class Study:
    """Model, optimizer and schedule."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, max_norm: float) -> None:
        assert isinstance(model, DeepHit)
        self.model, self.max_norm = model, max_norm
        for risk in model.risks:
            fully_shard(risk, mesh=mesh)
        self.whole: FSDPModule = fully_shard(model, mesh=mesh)
        self.optimizer = make_optimizer(model.parameters())
        self.schedule = make_schedule(self.optimizer)

    def step(self, group: list[Patients]) -> tuple[Tensor, Tensor]:
        """Return loss and norm of a step with some batches."""
        weight = torch.tensor(sum(map(weight_of, group)))
        dist.all_reduce(weight)
        total = torch.zeros(())
        for number, batch in enumerate(group, start=1):
            self.whole.set_requires_gradient_sync(number == len(group))
            loss = event_loss(self.model, batch)
            scaled = loss * dist.get_world_size() / weight
            scaled.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return total / weight, norm


@own_loop(
    model=DeepHit,
    loss=event_loss,
    batch=patients,
    count=weight_of,
    optimizer=make_optimizer,
    scheduler=make_schedule,
    meshes=["dp2", "hsdp2x2"],
)
def train(config: LoopConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Train as the script does."""
    study = Study(config.model(), config.device_mesh(), config.max_norm)
    yield from map(study.step, config.steps)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(1 + dist.get_rank())
    script = Study(DeepHit(), init_device_mesh("cpu", (dist.get_world_size(),)), 1.0)
    for _ in range(8):
        print([float(number) for number in script.step([patients(source) for _ in range(2)])])
    dist.destroy_process_group()
