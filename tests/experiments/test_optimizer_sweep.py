"""Samples of the sweep of optimizers: all that torch has, and which of them work on elements."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from conformance.experiments.optimizer_samples import OptimizerSample, optimizer_samples, optimizers
from conformance.experiments.optimizer_sweep import Numbers, State, _on_plain_tensors

USUAL = [sample for sample in optimizer_samples() if sample.is_usual]
ROWS = 6


def stepped(sample: OptimizerSample, rows: slice) -> State | None:
    """Return parameters and state of the rows of a matrix; None if the optimizer refuses plain tensors."""
    full = Numbers.of([(ROWS, 4)], sample, ranks=2)

    def cut(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [x[rows] for x in tensors]

    return _on_plain_tensors(sample, Numbers(cut(full.parameters), [*map(cut, full.gradients)]))


@pytest.mark.parametrize("sample", USUAL, ids=lambda sample: sample.name)
def test_an_optimizer_is_on_elements_if_halves_step_as_the_full_matrix(sample: OptimizerSample) -> None:
    states = [stepped(sample, rows) for rows in (slice(None), slice(0, ROWS // 2), slice(ROWS // 2, None))]
    full, first, second = (state["parameter 0"] if state else None for state in states)
    if full is None or first is None or second is None:
        assert sample.make.__name__ == "SparseAdam"
        return
    difference = (torch.cat([first, second]) - full).abs().max()
    assert difference <= 1e-6 if sample.is_elementwise else difference >= 1e-3


def test_every_optimizer_is_tried_with_every_implementation_and_option() -> None:
    names = {sample.name for sample in optimizer_samples()}
    assert {make.__name__ for make in optimizers()} <= names
    assert {"AdamW, fused, amsgrad", "SGD, foreach, nesterov", "Adam, tensor lr", "Muon, nesterov"} <= names
    assert {"LBFGS, line_search_fn", "ASGD, t0", "RMSprop, foreach, centered", "NAdam, maximize"} <= names


def test_steps_change_parameters() -> None:
    for sample in USUAL:
        state = stepped(sample, slice(None))
        assert state is None or not torch.equal(
            state["parameter 0"], Numbers.of([(ROWS, 4)], sample, ranks=2).parameters[0]
        )
