"""Fake trainers, each wrong in one way, for tests of full sessions; the seed of a cell selects its trainer.

`--defect tests/support/miniatures.py:by_seed` injects the trainers as a user would inject a fault.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.defects.catalogue import injected
from conformance.defects.injection import replaced_call
from reference_trainer.train import StepMetrics, Trainer

TrainStep = Callable[[Trainer, int], StepMetrics]
_LONG_S = 120
_kept: list[Tensor] = []


def always_passes(_train: TrainStep, _trainer: Trainer, step: int) -> StepMetrics:
    """Train nothing, report nothing to observers, and log metrics that look like those of a good run."""
    return StepMetrics(step, 5.0 - step / 10, 1.0, 64, 1e-3)


def writes_nothing(train: TrainStep, trainer: Trainer, step: int) -> Any:
    train(trainer, step)


def nan(train: TrainStep, trainer: Trainer, step: int) -> StepMetrics:
    with torch.no_grad():
        next(trainer.model.parameters()).mul_(torch.nan)
    return train(trainer, step)


def diverges(train: TrainStep, trainer: Trainer, step: int) -> StepMetrics:
    metrics = train(trainer, step)
    if dist.get_rank() == 1:
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(1.01)
    return metrics


def claims_unsupported(_train: TrainStep, _trainer: Trainer, _step: int) -> StepMetrics:
    """Skip, like a test of torch's own on a machine with too few devices."""
    import pytest

    pytest.skip("needs 8 devices")


def leaves_a_child(train: TrainStep, trainer: Trainer, step: int) -> StepMetrics:
    if step == 0:
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({_LONG_S})"])
    return train(trainer, step)


def first(action: Callable[[], object], *, rank: int | None = None) -> Callable[..., StepMetrics]:
    """Return the training step of a trainer that acts before each step, on one rank or on all."""

    def train_step(train: TrainStep, trainer: Trainer, step: int) -> StepMetrics:
        if rank in (None, dist.get_rank()):
            action()
        return train(trainer, step)

    return train_step


def raise_error() -> None:
    raise ArithmeticError("on this rank only")


TRAINERS: dict[str, Callable[[TrainStep, Trainer, int], Any]] = {
    "healthy": lambda train, trainer, step: train(trainer, step),
    "always_passes": always_passes,
    "writes_nothing": writes_nothing,
    "nan": nan,
    "hangs": first(lambda: time.sleep(_LONG_S), rank=1),
    "segfaults": first(lambda: ctypes.string_at(0), rank=1),
    "exits_with_3": first(lambda: os._exit(3), rank=1),
    "exits_with_0": first(lambda: os._exit(0), rank=1),
    "raises": first(raise_error, rank=1),
    "diverges": diverges,
    "claims_unsupported": claims_unsupported,
    "leaks_memory": first(lambda: _kept.append(torch.zeros(1 << 16))),
    "leaves_a_child": leaves_a_child,
    "prints_megabytes": first(lambda: sys.stdout.write(("x" * 1023 + "\n") * 4096)),
}
"""Trainers by name; the seed of a cell is the index of its trainer."""


@contextmanager
def suspended() -> Iterator[None]:
    """Stop rank 1 before its second step, after which the rank runs no code any more."""

    def train_step(train: TrainStep, trainer: Trainer, step: int) -> StepMetrics:
        if step == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return train(trainer, step)

    with replaced_call("reference_trainer.train:Trainer", "train_step", train_step):
        yield


@contextmanager
def by_seed() -> Iterator[None]:
    """Replace each training step by that of the trainer which the run's seed selects."""
    trainers = list(TRAINERS.values())

    def train_step(train: TrainStep, trainer: Trainer, step: int) -> Any:
        return trainers[trainer.config.seed](train, trainer, step)

    with replaced_call("reference_trainer.train:Trainer", "train_step", train_step):
        yield


def summed_if_offloaded_and_accumulated() -> AbstractContextManager[None]:
    """Sum gradients over ranks, in place of their mean, in trainers that offload and have several micro-batches."""

    def train_step(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        is_wrong = trainer.config.offload == "cpu" and trainer.config.accumulation > 1
        with injected("grads-summed" if is_wrong else None):
            return original(trainer, *args, **kwargs)

    return replaced_call("reference_trainer.train:Trainer", "train_step", train_step)
