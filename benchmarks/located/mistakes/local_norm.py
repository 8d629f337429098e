"""Gradients that are clipped by the norm of a rank's own shards."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.located.mistakes.trainer import Trainer, TrainingRun, full


def local(gradient: Tensor) -> Tensor:
    """Return this rank's shard of a gradient."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


class WrongRun(TrainingRun):
    """Run in which ranks scale their gradients by different factors."""

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of this rank's shards."""
        return torch.nn.utils.get_total_norm([local(each) for each in gradients])  # mistake: local-norm


class RightRun(TrainingRun):
    """Run that lets torch reduce the norm of all DTensors over their mesh."""

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of the full gradients."""
        return full(torch.nn.utils.get_total_norm(gradients))


class Wrong(Trainer):
    """Trainer with the mistake."""

    run_class = WrongRun


class Right(Trainer):
    """Trainer without it."""

    run_class = RightRun
