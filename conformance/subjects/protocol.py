"""Subject: a way to train in parallel that can be judged, and its interface.

An adapter never gathers, averages over ranks for the suite, or compares: what it returns is measured, not believed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conformance.subjects.cells import SubjectCell
from reference_trainer.checks import UsageError
from reference_trainer.observer import Phase

Batch = Any
"""Samples for one forward pass: a tensor, or a mapping, list or tuple of such; samples are dimension 0."""


class SubjectMistake(UsageError):
    """Mistake of the subject's author, for which it cannot be judged; the message says what to do."""


class StepObserver(Protocol):
    """Methods that a run calls while it takes a step, so that the suite sees the moments in between."""

    def built(self) -> None:
        """Tell that the parallel model exists, and has loaded its checkpoint; only a `SelfShardingRun` does this."""

    def phase(self, name: Phase, *, step: int) -> None:
        """Tell the phase that begins: `forward` and `backward` of each micro-batch, `clip`, `optimizer`, `idle`."""

    def gradients(self, model: nn.Module, *, step: int) -> None:
        """Tell that all gradients of the step are reduced, and not clipped yet."""

    def clipped(self, model: nn.Module, *, norm: Tensor | None, step: int) -> None:
        """Tell that the optimizer is about to step; `norm`, a scalar, was the gradients' norm before clipping.

        None if the trainer does not tell the norm, which is not judged then.
        """


class Built(Protocol):
    """One rank of a subject that has been built."""

    @property
    def model(self) -> nn.Module:
        """Parallel model."""

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer that trains it."""

    @property
    def data_rank(self) -> int:
        """Index of this rank among those that see different data."""


class Run(Built, Protocol):
    """One rank of a subject whose steps the suite asks for, one by one."""

    def step(self, step: int, micro_batches: Sequence[Batch], observer: StepObserver) -> float | Tensor:
        """Train a step: forward and backward of each micro-batch, clip, step; returns the loss that is logged."""


@runtime_checkable
class LoopedRun(Built, Protocol):
    """One rank of a subject whose own loop takes all steps in one call."""

    def train(self, steps: Sequence[Sequence[Batch]], observer: StepObserver) -> Sequence[float | Tensor]:
        """Train on the micro-batches of each step; returns the loss of each step that is logged."""


@runtime_checkable
class SelfShardingRun(LoopedRun, Protocol):
    """Looped run whose trainer makes the model parallel in `train`; it calls `observer.built` before the first step."""

    shards_in_train: bool
    """True, always."""


@runtime_checkable
class Resumable(Protocol):
    """Run that can be saved, and loaded into a newly built run. All ranks call each method together."""

    def save(self, directory: Path) -> None:
        """Save the full training state, model and optimizer included, in a directory that all ranks share."""

    def load(self, directory: Path) -> None:
        """Load the files of `save`."""


class Subject(Protocol):
    """Way to train in parallel."""

    @property
    def name(self) -> str:
        """Name in messages."""

    @property
    def shims(self) -> Sequence[str]:
        """Private names that were touched to make the subject run here; a report names them."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the packages that are judged."""

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return why the subject cannot run a cell, or None."""

    def model(self, *, tied: bool) -> nn.Module:
        """Return the model for one process, in fp32, without dropout: the reference trains this one.

        With `tied` its embedding and its head are one parameter; `unsupported` tells of a model that has no such form.
        """

    def batch(self, generator: torch.Generator) -> Batch:
        """Return a micro-batch whose samples depend on the generator alone."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a micro-batch, a scalar: a sum over samples or tokens."""

    def count(self, batch: Batch) -> float:
        """Return the number by which the loss of a batch counts: its samples, valid tokens, or the sum of weights."""

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return the optimizer that the reference trains with."""

    def build(self, cell: SubjectCell, *, device: torch.device, max_norm: float) -> Run | LoopedRun:
        """Build the parallel model and its optimizer on this rank; the default process group exists.

        For a cell that is resumed, the run must be `Resumable`.
        """


_WRAPPERS = ("_forward_module", "module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names that wrappers put into the names of parameters."""


def reference_name(name: str, known: Iterable[str]) -> str:
    """Return the name that a parameter has in the model of one process: without the names of wrappers.

    A name that the model itself has is left alone, so that a model may call its own modules `module`.
    """
    return name if name in known else ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def module_names(parameters: Iterable[str]) -> Callable[[str], str]:
    """Return the function that gives a module's path in the model of one process, of its path in a parallel model.

    `parameters` are the names of the parameters of the model of one process.
    """
    known = {name.rsplit(".", depth)[0] for name in parameters for depth in range(1, name.count(".") + 1)}
    return lambda path: reference_name(path, known)
