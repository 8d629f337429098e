"""Calibration of a machine: the time of a fixed piece of work that resembles what ranks do, for estimates of sessions.

Ranks spend their time in Python between small operators, and in collectives that wait for the slowest rank. So the
work is small too: a step of a tiny model with a mode that sees every operator, as instruments do, and an all-reduce.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.experiments.context import RankWorld, experiment
from conformance.run.experiment import Needs

_WIDTH = 32
_STEPS = 30


@experiment(needs=Needs.NOTHING)
def calibrate(rank: RankWorld) -> float:
    """Return the time that the fixed piece of work takes in seconds; a step before it does what is done once.

    It is the median of its steps' times, so that a moment in which the machine was busy does not count.
    """
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH))
    model.to(rank.device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch = torch.ones(4, _WIDTH, device=rank.device)
    with _SeesOperators():
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


class _SeesOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that notes the name of each operator, and the sizes of its tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted: dict[tuple[str, tuple[int, ...]], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        sizes = tuple(each.numel() for each in args if isinstance(each, torch.Tensor))
        self._noted[str(func), sizes] = self._noted.get((str(func), sizes), 0) + 1
        return func(*args, **(kwargs or {}))
