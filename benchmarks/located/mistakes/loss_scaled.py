"""Loss that is scaled by the number of all ranks, though tensor-parallel ranks see the same tokens."""

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.located.mistakes.trainer import Trainer, TrainingRun


class WrongRun(TrainingRun):
    """Run whose gradients are tp times too large."""

    def backward(self, loss: Tensor, count: float) -> None:
        """Backpropagate the loss, scaled by the size of the world."""
        torch.autograd.backward(loss * (dist.get_world_size() / count))  # mistake: loss-scaled


class RightRun(TrainingRun):
    """Run that also counts the ranks, and divides by the number of those that see the same tokens."""

    def backward(self, loss: Tensor, count: float) -> None:
        """Backpropagate the loss, scaled by the number of ranks with different data."""
        torch.autograd.backward(loss * (dist.get_world_size() / self.data.copies / count))


class Wrong(Trainer):
    """Trainer with the mistake."""

    run_class = WrongRun


class Right(Trainer):
    """Trainer without it."""

    run_class = RightRun
