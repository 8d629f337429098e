"""Proximal policy optimisation of continuous actions: policy, value and entropy in one loss, over masked steps.

    conformance judge ppo.py:train

Own loop, with a schedule and figures that are computed without gradient after each step.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributions import Normal
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from conformance.subjects import LoopConfig, own_loop

OBSERVED, ACTIONS, WIDTH, STEPS = 9, 3, 20, 7
RANGE, VALUE, ENTROPY = 0.2, 0.5, 0.01
Rollouts = dict[str, Tensor]


def orthogonal(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """Return a layer with orthogonal weights."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class ActorCritic(nn.Module):
    """Trunk, policy and value; the logarithms of deviations are the same in all states."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            orthogonal(OBSERVED, WIDTH, 2**0.5), nn.Tanh(), orthogonal(WIDTH, WIDTH, 2**0.5), nn.Tanh()
        )
        self.policy, self.value = orthogonal(WIDTH, ACTIONS, 0.01), orthogonal(WIDTH, 1, 1.0)
        self.log_deviation = nn.Parameter(torch.full((ACTIONS,), -0.5))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return means and deviations of actions (..., ACTIONS), and values (...)."""
        x = self.trunk(observations)
        mean = self.policy(x)
        return mean, self.log_deviation.exp().expand_as(mean), self.value(x).squeeze(-1)


def rollouts(generator: torch.Generator) -> Rollouts:
    """Return episodes of unequal length; advantages have mean 0 and deviation 1 over all that was collected."""
    observations = torch.randn(6, STEPS, OBSERVED, generator=generator)
    return {
        "observations": observations,
        "actions": observations[..., :ACTIONS] * 0.3 + 0.6 * torch.randn(6, STEPS, ACTIONS, generator=generator),
        "log_probability": -2.5 + 0.3 * torch.randn(6, STEPS, generator=generator),
        "advantages": torch.randn(6, STEPS, generator=generator),
        "returns": torch.randn(6, STEPS, generator=generator),
        "old_values": 0.3 * torch.randn(6, STEPS, generator=generator),
        "is_step": torch.arange(STEPS) < torch.randint(2, STEPS + 1, (6, 1), generator=generator),
    }


def clipped_objective(model: nn.Module, batch: Rollouts) -> Tensor:
    """Return PPO's loss, summed over the steps of episodes."""
    mean, deviation, value = model(batch["observations"])
    distribution: Any = Normal(mean, deviation, validate_args=False)
    ratio = (distribution.log_prob(batch["actions"]).sum(-1) - batch["log_probability"]).exp()
    advantages = batch["advantages"]
    policy = -torch.minimum(ratio * advantages, ratio.clamp(1 - RANGE, 1 + RANGE) * advantages)
    near = batch["old_values"] + (value - batch["old_values"]).clamp(-RANGE, RANGE)
    errors = torch.maximum((value - batch["returns"]).square(), (near - batch["returns"]).square())
    entropy = distribution.entropy().sum(-1)
    return cast("Tensor", ((policy + VALUE * errors - ENTROPY * entropy) * batch["is_step"]).sum())


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Adam with the large epsilon of PPO."""
    return Adam(parameters, lr=3e-3, eps=1e-5)


def make_schedule(optimizer: Optimizer) -> LambdaLR:
    """Return a learning rate that falls to zero."""
    return LambdaLR(optimizer, lambda step: 1 - step / 20)


@torch.no_grad()
def divergence(model: nn.Module, batches: list[Rollouts]) -> Tensor:
    """Return the approximate divergence from the policy that has acted, summed over ranks."""
    total = torch.zeros(())
    for batch in batches:
        mean, deviation, _ = model(batch["observations"])
        distribution: Any = Normal(mean, deviation)
        difference = distribution.log_prob(batch["actions"]).sum(-1) - batch["log_probability"]
        total += ((difference.exp() - 1 - difference) * batch["is_step"]).sum()
    cast("FSDPModule", model).reshard()
    dist.all_reduce(total)
    return total


@own_loop(
    model=ActorCritic,
    loss=clipped_objective,
    batch=rollouts,
    count=lambda batch: int(batch["is_step"].sum()),
    optimizer=make_optimizer,
    scheduler=make_schedule,
    meshes=["dp2", "hsdp2x2"],
)
def train(config: LoopConfig) -> Iterator[dict[str, Any]]:
    """Take one pass over the rollouts of each step."""
    model = cast("ActorCritic", config.model())
    mesh = config.device_mesh()
    fully_shard(model.trunk, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters())
    schedule = make_schedule(optimizer)
    for micro_batches in config.steps:
        optimizer.zero_grad()
        totals = torch.stack([sum((b["is_step"].sum() for b in micro_batches), torch.zeros(())), torch.zeros(())])
        dist.all_reduce(totals[0])
        for index, batch in enumerate(micro_batches):
            cast("FSDPModule", model).set_requires_gradient_sync(index == len(micro_batches) - 1)
            loss = clipped_objective(model, batch) / totals[0]
            torch.autograd.backward(loss * dist.get_world_size())
            totals[1] += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
        optimizer.step()
        schedule.step()
        dist.all_reduce(totals[1])
        divergence(model, micro_batches)
        yield {"loss": totals[1], "grad_norm": norm}
