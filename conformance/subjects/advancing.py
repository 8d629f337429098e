"""State of a model that advances with each call, by any data: a count of calls, an iteration of spectral norm.

A rank calls its model for its own micro-batches. One process calls it for those of all ranks, and would be further on.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from conformance.subjects.cells import Workload
from conformance.subjects.data import all_micro_batches, micro_batches
from conformance.subjects.protocol import Batch, Subject
from conformance.subjects.turns import turn_of, turns_of

Buffers = Mapping[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


def buffers_of(model: nn.Module, names: Iterable[str] | None = None) -> Buffers:
    """Return copies of a model's buffers, of all or of those with some names."""
    buffers = dict(model.named_buffers())
    return {name: buffers[name].clone() for name in (buffers if names is None else names)}


@torch.no_grad()
def put_back(model: nn.Module, kept: Buffers) -> None:
    """Copy buffers into those of a model with the same names."""
    buffers = dict(model.named_buffers())
    for name, tensor in kept.items():
        buffers[name].copy_(tensor)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Open a context after which a model's buffers are as they were before."""
    kept = buffers_of(model)
    try:
        yield
    finally:
        put_back(model, kept)


def advancing_buffers(model: nn.Module, losses: Sequence[Loss], batches: Sequence[Batch]) -> list[str]:
    """Return the buffers that a call changes in the same way for two micro-batches, the first and the last one.

    `losses` are those of all turns, each a function of model and batch.
    """
    before = buffers_of(model)
    changed = {name for loss in losses for name in _advanced(model, loss, batches, before)} if before else set()
    return [name for name in before if name in changed]


def _advanced(model: nn.Module, loss: Loss, batches: Sequence[Batch], before: Buffers) -> Iterator[str]:
    after: list[Buffers] = []
    for batch in (batches[0], batches[-1]):
        with buffers_kept(model), torch.no_grad():
            loss(model, batch)
            after.append(buffers_of(model))
        if all(torch.equal(after[0][name], tensor) for name, tensor in before.items()):
            return
    for name, tensor in before.items():
        if torch.equal(*(each[name] for each in after)) and not torch.equal(after[0][name], tensor):
            yield name


@torch.no_grad()
def model_at(
    model: nn.Module, subject: Subject, workload: Workload, *, step: int, weights: Mapping[str, Tensor]
) -> list[str]:
    """Give a model, in fp32, the weights and the advanced buffers with which a step of a run begins.

    `weights` are those of the run, by `stepN/NAME`. Returns the names of the buffers that advance.
    """

    def load(number: int) -> None:
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[f"step{number}/{name}"])

    load(0)
    first = all_micro_batches(subject, workload, step=0)
    advancing = advancing_buffers(model, [turn.subject.loss for turn in turns_of(subject)], first)
    for earlier in range(step) if advancing else ():
        load(earlier)
        for batch in micro_batches(subject, workload, step=earlier, data_rank=0):
            turn_of(subject, earlier).subject.loss(model, batch)
    load(step)
    return advancing
