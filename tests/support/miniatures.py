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
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.defects.injection import replaced
from reference_trainer.train import StepMetrics, Trainer

TrainStep = Callable[[Trainer, int], StepMetrics]
_LONG_S = 120
_MEGABYTES = "x" * 1023 + "\n"
_kept: list[Tensor] = []


def healthy(train: TrainStep, trainer: Trainer, step: int) -> StepMetrics:
    return train(trainer, step)


def always_passes(_train: TrainStep, _trainer: Trainer, step: int) -> StepMetrics:
    """Train nothing, report nothing to observers, and log metrics that look like those of a good run."""
    return StepMetrics(step, 5.0 - step / 10, 1.0, 64, 1e-3)


def writes_nothing(train: TrainStep, trainer: Trainer, step: int) -> Any:
    train(trainer, step)


def nan(train: TrainStep, trainer: Trainer, step: int) -> StepMetrics:
    with torch.no_grad():
        next(trainer.model.parameters()).mul_(torch.nan)
    return train(trainer, step)


def hangs(train: TrainStep, trainer: Trainer, step: int) -> StepMetrics:
    if dist.get_rank() == 1:
        time.sleep(_LONG_S)
    return train(trainer, step)


def segfaults(train: TrainStep, trainer: Trainer, step: int) -> StepMetrics:
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    return train(trainer, step)


def exits_with_3(train: TrainStep, trainer: Trainer, step: int) -> StepMetrics:
    if dist.get_rank() == 1:
        os._exit(3)
    return train(trainer, step)


def exits_with_0(train: TrainStep, trainer: Trainer, step: int) -> StepMetrics:
    if dist.get_rank() == 1:
        os._exit(0)
    return train(trainer, step)


def raises(train: TrainStep, trainer: Trainer, step: int) -> StepMetrics:
    if dist.get_rank() == 1:
        raise ArithmeticError("on this rank only")
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


def leaks_memory(train: TrainStep, trainer: Trainer, step: int) -> StepMetrics:
    _kept.append(torch.zeros(1 << 16))
    return train(trainer, step)


def leaves_a_child(train: TrainStep, trainer: Trainer, step: int) -> StepMetrics:
    if step == 0:
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({_LONG_S})"])
    return train(trainer, step)


def prints_megabytes(train: TrainStep, trainer: Trainer, step: int) -> StepMetrics:
    for _ in range(4096):
        sys.stdout.write(_MEGABYTES)
    return train(trainer, step)


BY_SEED: dict[int, Callable[[TrainStep, Trainer, int], Any]] = dict(
    enumerate(
        (
            healthy,
            always_passes,
            writes_nothing,
            nan,
            hangs,
            segfaults,
            exits_with_3,
            exits_with_0,
            raises,
            diverges,
            claims_unsupported,
            leaks_memory,
            leaves_a_child,
            prints_megabytes,
        )
    )
)


@contextmanager
def suspended() -> Iterator[None]:
    """Stop rank 1 before its second step, after which the rank runs no code any more."""

    def make(original: Any) -> Any:
        def train_step(trainer: Trainer, step: int) -> Any:
            if step == 1 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            return original(trainer, step)

        return train_step

    with replaced("reference_trainer.train:Trainer", "train_step", make):
        yield


@contextmanager
def by_seed() -> Iterator[None]:
    """Replace each training step by that of the trainer which the run's seed selects."""

    def make(original: Any) -> Any:
        def train_step(trainer: Trainer, step: int) -> Any:
            return BY_SEED[trainer.config.seed](original, trainer, step)

        return train_step

    with replaced("reference_trainer.train:Trainer", "train_step", make):
        yield
