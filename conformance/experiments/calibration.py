"""Calibration of a machine: the time of a fixed piece of work like that of ranks, for estimates of sessions.

Ranks spend their time in Python between small operators, and in collectives that wait for the slowest rank. So the
work is small too: steps of a tiny model under the tap of operators that instruments use, with an all-reduce of each
gradient.
"""

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from conformance.experiments.context import RankWorld, experiment
from conformance.instruments.dispatch_tap import DispatchTap, EarlyListener
from conformance.run.experiment import Needs

_WIDTH = 32
_STEPS = 30


@experiment(needs=Needs.NOTHING)
def calibrate(rank: RankWorld) -> float:
    """Return the time that the fixed piece of work takes in seconds, after a step that pays for first calls.

    The median of its steps counts for all, so that a moment in which the machine was busy changes nothing.
    """
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH))
    model.to(rank.device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch = torch.ones(4, _WIDTH, device=rank.device)
    with DispatchTap([], before=[_count(Counter())]):
        steps_s = [_timed_step(model, optimizer, batch) for _ in range(1 + _STEPS)][1:]
    return round(_STEPS * statistics.median(steps_s), 4)


def _timed_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    start_s = time.monotonic()
    model(batch).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    return time.monotonic() - start_s


def _count(seen: Counter[int]) -> EarlyListener:
    """Return a listener that counts operators by the number of their arguments."""

    def handle(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        seen[len(args) + len(kwargs)] += 1

    return lambda _func: handle
