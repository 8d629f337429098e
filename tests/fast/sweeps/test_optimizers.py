"""Samples of the sweep of optimizers: all that torch has, and which of them work on elements."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from conformance.sweeps.optimizers import (
    IMPOSSIBLE,
    Numbers,
    OptimizerSample,
    State,
    all_samples,
    optimizer_samples,
    optimizers,
)
from conformance.sweeps.optimizers import stepped as on_plain_tensors

USUAL = [sample for sample in optimizer_samples() if sample.is_usual]
ROWS = 6


def stepped(sample: OptimizerSample, rows: slice) -> State:
    """Return parameters and state of the rows of a matrix."""
    full = Numbers.of([(ROWS, 4)], sample, ranks=2)

    def cut(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [x[rows] for x in tensors]

    return on_plain_tensors(sample, Numbers(cut(full.parameters), [*map(cut, full.gradients)]))


@pytest.mark.parametrize("sample", USUAL, ids=lambda sample: sample.name)
def test_an_optimizer_is_on_elements_if_halves_step_as_the_full_matrix(sample: OptimizerSample) -> None:
    states = [stepped(sample, rows) for rows in (slice(None), slice(0, ROWS // 2), slice(ROWS // 2, None))]
    full, first, second = (state["parameter 0"] for state in states)
    difference = (torch.cat([first, second]) - full).abs().max()
    assert difference <= 1e-6 if sample.is_elementwise else difference >= 1e-3


def test_every_optimizer_is_tried_with_every_implementation_and_option() -> None:
    names = {sample.name for sample in optimizer_samples()}
    assert {make.__name__ for make in optimizers()} - names == {"SparseAdam"}
    assert {"AdamW, fused, amsgrad", "SGD, foreach, nesterov", "Adam, tensor lr", "Muon, nesterov"} <= names
    assert {"LBFGS, line_search_fn", "ASGD, t0", "RMSprop, foreach, centered", "NAdam, maximize"} <= names


def test_steps_change_parameters() -> None:
    for sample in USUAL:
        state = stepped(sample, slice(None))
        assert not torch.equal(state["parameter 0"], Numbers.of([(ROWS, 4)], sample, ranks=2).parameters[0])


def test_plain_tensors_are_refused_for_the_samples_that_are_said_to_be_impossible_alone() -> None:
    refused = set()
    for sample in all_samples():
        try:
            stepped(sample, slice(None))
        except (AssertionError, RuntimeError, ValueError):
            refused.add(sample.name)
    assert refused == IMPOSSIBLE.keys()
