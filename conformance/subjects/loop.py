"""Loop that the suite supplies to subjects that are one function: loss normalisation, accumulation, clipping, step."""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from conformance.instruments.gradient_sync import GRADIENT_SYNC
from conformance.report.trainer import INGREDIENTS, Ingredient
from conformance.subjects.data import to_device
from conformance.subjects.protocol import Batch, StepObserver, SubjectMistake


@dataclass(frozen=True)
class DataGroup:
    """Place of a rank among those that see different data."""

    rank: int
    ranks: int
    copies: int
    """Number of ranks that see the same data."""

    def total(self, number: float) -> float:
        """Return the sum of a number over the ranks with different data. A collective of the world, in fp64."""
        return float(self.sum(torch.tensor(number, dtype=torch.float64)))

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of an fp64 scalar over the ranks with different data, for which the host does not wait."""
        total = tensor.clone()
        dist.all_reduce(total)
        return total / self.copies


SaveOrLoad = Callable[[nn.Module, Optimizer, Path], object]
"""Function that saves a parallel model and its optimizer in a directory, or loads them from it, on all ranks."""


class Saving(NamedTuple):
    """Functions that save a run and load it."""

    save: SaveOrLoad
    load: SaveOrLoad


LOOP: tuple[Ingredient, ...] = ("loop", "sync", "scaling")
"""Ingredients of a step that the loop below always supplies."""


@dataclass
class Loop:
    """One rank that trains a model, see `protocol.Run`; the loss is the mean over all that counts in a step."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[nn.Module, Batch], Tensor]
    count: Callable[[Batch], float]
    clip: Callable[[Iterable[nn.Parameter]], Tensor]
    data: DataGroup
    averaged: bool
    """True if the gradients of ranks with different data are averaged, False if they are summed."""
    device: torch.device
    saving: Saving | None = None
    """None for a run that cannot be saved."""
    replaced: Collection[Ingredient] = ()
    """Ingredients besides `LOOP` that are the suite's: `clip` and `optimizer`, unless the owner has given them."""

    @property
    def by_suite(self) -> list[Ingredient]:
        """Ingredients of a step that the suite has supplied."""
        return [each for each in INGREDIENTS if each in (*LOOP, *self.replaced)]

    @property
    def data_rank(self) -> int:
        """Index of this rank among those with different data."""
        return self.data.rank

    def save(self, directory: Path) -> None:
        """Save model and optimizer, see `protocol.Resumable`."""
        self._saving.save(self.model, self.optimizer, directory)

    def load(self, directory: Path) -> None:
        """Load the files of `save`."""
        self._saving.load(self.model, self.optimizer, directory)

    @property
    def _saving(self) -> Saving:
        if self.saving is None:
            raise SubjectMistake("the run was made without functions that save and load it")
        return self.saving

    def step(self, step: int, micro_batches: Sequence[Batch], observer: StepObserver) -> Tensor:
        """Train a step; returns its mean loss, which the host has not waited for: its wait would hide races."""
        count = self.data.total(sum(self.count(batch) for batch in micro_batches))
        scale = (self.data.ranks if self.averaged else 1) / count
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        *earlier, last = micro_batches
        with GRADIENT_SYNC.postponed(self.model) if earlier else nullcontext():
            for batch in earlier:
                loss_sum += self._backpropagated(batch, scale, observer, step=step)
        loss_sum += self._backpropagated(last, scale, observer, step=step)
        observer.gradients(self.model, step=step)
        observer.phase("clip", step=step)
        norm = self.clip(self.model.parameters())
        observer.clipped(self.model, norm=norm, step=step)
        observer.phase("optimizer", step=step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        observer.phase("idle", step=step)
        return self.data.sum(loss_sum) / count

    def _backpropagated(self, batch: Batch, scale: float, observer: StepObserver, *, step: int) -> Tensor:
        """Add the gradients of a micro-batch; returns its loss, without gradient."""
        observer.phase("forward", step=step)
        loss = self.loss(self.model, to_device(batch, self.device))
        observer.phase("backward", step=step)
        torch.autograd.backward(loss * scale)
        return plain(loss)


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor, plain or DTensor, as a plain one without gradient."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def scalar(tensor: Tensor) -> float:
    """Return the number in a scalar tensor, plain or DTensor."""
    return float(plain(tensor))
