"""Batches of any container, and micro-batches of uneven ranks."""

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from conformance.subjects import subject
from conformance.subjects.cells import Workload
from conformance.subjects.data import halved, micro_batches, permuted, samples, to_dtype
from conformance.subjects.feeding import joined
from conformance.subjects.protocol import Batch


class Pair(NamedTuple):
    """Inputs and labels by name."""

    inputs: Tensor
    labels: Tensor


def pair() -> tuple[Tensor, Tensor]:
    return torch.arange(20.0).view(5, 4), torch.arange(5)


@pytest.mark.parametrize(
    "batch",
    [pair(), [*pair()], Pair(*pair()), dict(zip("xy", pair(), strict=True)), UserDict(x=pair()[0], y=pair()[1])],
)
def test_a_batch_keeps_its_type(batch: Any) -> None:
    for changed in (halved(batch), permuted(batch, seed=1), to_dtype(batch, torch.float64), joined([batch, batch])):
        assert type(changed) is type(batch)
    assert (samples(halved(batch)), samples(joined([batch, batch]))) == (3, 10)
    first = permuted(batch, seed=1)
    inputs = first["x"] if hasattr(first, "keys") else first[0]
    assert not torch.equal(inputs, pair()[0])


def summed(model: nn.Module, batch: Batch) -> Tensor:
    outputs: Tensor = model(batch[0])
    return outputs.sum()


def test_the_last_micro_batch_of_every_second_rank_is_halved_where_they_are_uneven() -> None:
    trainer = subject(model=nn.Identity, loss=summed, batch=lambda _generator: pair())(
        lambda model, mesh, config: model
    )
    workload = Workload(tied=False, data_ranks=2, accumulation=(2, 1), uneven=True)
    sizes = [
        [len(inputs) for inputs, _ in micro_batches(trainer, workload, step=step, data_rank=rank)]
        for step in range(2)
        for rank in range(2)
    ]
    assert sizes == [[5, 5], [5, 3], [5], [3]]
