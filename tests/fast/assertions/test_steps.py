"""Comparison of a step with its emulation where inductor rounds in other places."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from conformance.assertions import steps
from conformance.oracles.reference import Tensors, initial_model
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell

CELL = Cell(mesh="dp2", precision="bf16-mp", compile=True)


class Recorded:
    """Record of one step that inductor compiled, with gradients made of those of the emulation and of fp32."""

    cell, device_type, kernel_type = CELL, "cpu", "cpu"

    def __init__(self, gradients: Callable[[Tensors, Tensors], Tensors]) -> None:
        self.config = msgspec.structs.replace(CELL.config, compile="inductor")
        self.ranks = [SimpleNamespace(steps=[SimpleNamespace(step=0, loss_scale=1.0, skipped=False)])]
        self._of: dict[str, Tensors] = {
            "step0/parameter/": {name: p.detach() for name, p in initial_model(self.config).named_parameters()}
        }
        record: Any = self
        emulated = steps.emulation_of(record, 0)
        self.losses = [emulated.loss * 1.01]  # inductor rounds the loss otherwise, too
        self._of["step0/gradient/"] = gradients(emulated.gradients, steps.in_fp32(record, 0).gradients)

    def select(self, prefix: str) -> Tensors:
        return self._of[prefix]


def emulated(emulated: Tensors, _exact: Tensors) -> Tensors:
    return emulated


def rounded_less(emulated: Tensors, exact: Tensors) -> Tensors:
    return {name: exact[name] + 0.9 * (emulated[name] - exact[name]) for name in exact}


def exact(_emulated: Tensors, exact: Tensors) -> Tensors:
    return exact


def summed(emulated: Tensors, _exact: Tensors) -> Tensors:
    return {name: grad * 2 for name, grad in emulated.items()}


def one_percent_off(emulated: Tensors, _exact: Tensors) -> Tensors:
    return {name: grad * 1.01 for name, grad in emulated.items()}


def one_missing(emulated: Tensors, _exact: Tensors) -> Tensors:
    return {name: torch.zeros_like(grad) if "wq" in name else grad for name, grad in emulated.items()}


@pytest.mark.parametrize("gradients", [emulated, rounded_less])
def test_gradients_that_err_as_rounding_does_pass(gradients: Callable[[Tensors, Tensors], Tensors]) -> None:
    record: Any = Recorded(gradients)
    steps.compare_steps(record)


def test_another_loss_fails() -> None:
    record: Any = Recorded(emulated)
    record.losses = [2 * loss for loss in record.losses]
    with pytest.raises(ConformanceFailure, match="loss of step 0, emulated"):
        steps.compare_steps(record)


@pytest.mark.parametrize("gradients", [exact, summed, one_percent_off, one_missing])
def test_gradients_that_err_more_or_less_fail(gradients: Callable[[Tensors, Tensors], Tensors]) -> None:
    record: Any = Recorded(gradients)
    with pytest.raises(ConformanceFailure, match="error of step 0, compared with fp32"):
        steps.compare_steps(record)
