"""World model: a recurrent state with sampled categories foretells observations and rewards (as in Dreamer).

conformance judge world_model.py:WorldModelTraining

The noise of samples comes with the data; a sample passes its gradient straight to its chances.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Adam, Optimizer

from conformance.subjects.cells import SubjectCell
from conformance.subjects.protocol import StepObserver

SEEN, ACTIONS, DIM, GROUPS, CATEGORIES, TIMES = 6, 3, 12, 2, 4, 5
STATE = GROUPS * CATEGORIES
Episodes = dict[str, Tensor]


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return by how much one distribution, as logarithms (..., GROUPS, CATEGORIES), is not the other one."""
    return (p.exp() * (p - q)).sum((-1, -2))


class Dynamics(nn.Module):
    """Cell of the state, which is computed once for each time, and chances of categories with and without sight."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.cell = nn.Linear(STATE + ACTIONS, DIM), nn.GRUCell(DIM, DIM)
        self.prior, self.posterior = nn.Linear(DIM, STATE), nn.Linear(2 * DIM, STATE)

    def forward(self, features: Tensor, actions: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return states (episodes, TIMES, DIM + STATE), and logarithms of chances, with sight and without."""
        hidden, sampled = features.new_zeros(len(features), DIM), features.new_zeros(len(features), STATE)
        states, seeing, blind = [], [], []
        for time in range(TIMES):
            hidden = self.cell(F.elu(self.inputs(torch.cat([sampled, actions[:, time]], 1))), hidden)
            logits = self.posterior(torch.cat([hidden, features[:, time]], 1)).unflatten(1, (GROUPS, CATEGORIES))
            chosen = F.one_hot((logits + noise[:, time]).argmax(-1), CATEGORIES)
            chances = logits.softmax(-1)
            sampled = (chosen + chances - chances.detach()).flatten(1)
            states.append(torch.cat([hidden, sampled], 1))
            seeing.append(logits.log_softmax(-1))
            blind.append(self.prior(hidden).unflatten(1, (GROUPS, CATEGORIES)).log_softmax(-1))
        return torch.stack(states, 1), torch.stack(seeing, 1), torch.stack(blind, 1)


class WorldModel(nn.Module):
    """Encoder, dynamics, decoder and reward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SEEN, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, DIM))
        self.dynamics = Dynamics()
        self.decoder = nn.Sequential(nn.Linear(DIM + STATE, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, SEEN))
        self.reward = nn.Linear(DIM + STATE, 1)

    def forward(self, seen: Tensor, actions: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        """Return observations, rewards, and both logarithms of chances."""
        states, seeing, blind = self.dynamics(self.encoder(seen), actions, noise)
        return self.decoder(states), self.reward(states).squeeze(-1), seeing, blind


def world_loss(model: nn.Module, batch: Episodes) -> Tensor:
    """Return errors and balanced divergences, summed over times that an episode has."""
    seen, reward, seeing, blind = model(batch["seen"], batch["actions"], batch["noise"])
    errors = 0.5 * (seen - batch["seen"]).square().sum(-1) + (reward - batch["reward"]).square()
    apart = 0.5 * divergence(seeing.detach(), blind) + 0.1 * divergence(seeing, blind.detach())
    return cast("Tensor", ((errors + apart) * batch["is_time"]).sum())


class Run:
    """One rank that trains."""

    def __init__(self, model: WorldModel, optimizer: Optimizer, *, max_norm: float) -> None:
        self.model, self.optimizer, self.max_norm = model, optimizer, max_norm

    @property
    def data_rank(self) -> int:
        """Index of this rank among those with different data."""
        return dist.get_rank()

    def step(self, step: int, micro_batches: Sequence[Episodes], observer: StepObserver) -> float:
        """Train a step with the mean over all times."""
        totals = torch.tensor([0.0, sum(float(batch["is_time"].sum()) for batch in micro_batches)])
        dist.all_reduce(totals[1:])
        for index, batch in enumerate(micro_batches):
            cast("FSDPModule", self.model).set_requires_gradient_sync(index == len(micro_batches) - 1)
            observer.phase("forward", step=step)
            loss = world_loss(self.model, batch)
            observer.phase("backward", step=step)
            torch.autograd.backward(loss, dist.get_world_size() / totals[1])
            totals[0] += loss.detach()
        observer.gradients(self.model, step=step)
        observer.phase("clip", step=step)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        observer.clipped(self.model, norm=norm, step=step)
        observer.phase("optimizer", step=step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        observer.phase("idle", step=step)
        dist.all_reduce(totals[:1])
        return float(totals[0] / totals[1])


class WorldModelTraining:
    """The trainer for `conformance judge`."""

    name = "world_model"
    shims: Sequence[str] = ()

    def versions(self) -> Mapping[str, str]:
        """Return the version of torch."""
        return {"torch": str(torch.__version__)}

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return why a cell cannot be run, or None."""
        if cell.init == "meta" or cell.tied or cell.resumed or cell.offload or "tp" in cell.shape:
            return "not written"
        return "samples of categories jump in bf16" if cell.precision == "bf16" else None

    def model(self, *, tied: bool) -> nn.Module:
        """Return the model."""
        return WorldModel()

    def batch(self, generator: torch.Generator) -> Episodes:
        """Return episodes of unequal length, and noise by the distribution of Gumbel."""
        uniform = torch.rand(4, TIMES, GROUPS, CATEGORIES, generator=generator).clamp(1e-4, 1 - 1e-4)
        lengths = torch.randint(1, TIMES + 1, (4, 1), generator=generator)
        return {
            "seen": torch.randn(4, TIMES, SEEN, generator=generator),
            "actions": torch.randn(4, TIMES, ACTIONS, generator=generator).tanh(),
            "reward": torch.randn(4, TIMES, generator=generator),
            "noise": -(-uniform.log()).log(),
            "is_time": torch.arange(TIMES) < lengths,
        }

    def loss(self, model: nn.Module, batch: Episodes) -> Tensor:
        """Return the loss."""
        return world_loss(model, batch)

    def count(self, batch: Episodes) -> int:
        """Return the number of times."""
        return int(batch["is_time"].sum())

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return Adam."""
        return Adam(parameters, lr=1e-3, eps=1e-5)

    def build(self, cell: SubjectCell, *, device: torch.device, max_norm: float) -> Run:
        """Shard the networks."""
        model = WorldModel()
        mesh = init_device_mesh(device.type, tuple(cell.shape.values()), mesh_dim_names=tuple(cell.shape))
        options: dict[str, Any] = {"mesh": mesh}
        for network in (model.encoder, model.dynamics, model.decoder):
            fully_shard(network, **options)
        fully_shard(model, **options)
        return Run(model, self.make_optimizer(model.parameters()), max_norm=max_norm)
