"""The axis `optimizer`: each value shows in the state and in the operators of a record, and no other value passes."""

from types import SimpleNamespace
from typing import Any

import pytest

from conformance.assertions.axes.effects import optimizer_takes_effect
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell, axis_choices

ADAMW = ("exp_avg", "exp_avg_sq")
SHOWN: dict[str, tuple[tuple[str, ...], str]] = {
    "adamw": (ADAMW, "aten::addcdiv_"),
    "adamw-foreach": (ADAMW, "aten::_foreach_addcdiv_"),
    "adamw-fused": (ADAMW, "aten::_fused_adamw_"),
    "sgd": ((), "aten::add_"),
    "sgd-momentum": (("momentum_buffer",), "aten::add_"),
}
"""Keys of the state, and an operator of the step, by optimizer."""


def record(optimizer: Any, *, shown: str = "", device: str = "cpu") -> Any:
    """Return a record of a cell, with the state and the operators of the optimizer `shown`, or its own."""
    state, operator = SHOWN[shown or optimizer]
    facts = SimpleNamespace(
        fingerprints=[f"final/{kind}/w" for kind in ("parameter", *state)],
        operators={"optimizer": {operator: 3, "aten::_foreach_add_": 3}},
    )
    return SimpleNamespace(cell=Cell(optimizer=optimizer), ranks=[facts], device_type=device)


def test_every_optimizer_is_looked_at() -> None:
    assert tuple(sorted(SHOWN)) == tuple(sorted(map(str, axis_choices("optimizer"))))


@pytest.mark.parametrize("optimizer", [name for name in SHOWN if name != "adamw"])
def test_an_optimizer_shows(optimizer: str) -> None:
    optimizer_takes_effect(record(optimizer), record("adamw"))


@pytest.mark.parametrize("shown", SHOWN)
@pytest.mark.parametrize("optimizer", [name for name in SHOWN if name != "adamw"])
def test_another_optimizer_is_noticed(optimizer: str, shown: str) -> None:
    if shown == optimizer:
        return
    with pytest.raises(ConformanceFailure, match=r"state is|steps with"):
        optimizer_takes_effect(record(optimizer, shown=shown), record("adamw"))


def test_the_neighbour_has_torchs_own_choice() -> None:
    """On a CUDA device that is foreach."""
    on_device = record("adamw", shown="adamw-foreach", device="cuda")
    optimizer_takes_effect(record("adamw-fused", device="cuda"), on_device)
    with pytest.raises(ConformanceFailure, match="by default steps with"):
        optimizer_takes_effect(record("adamw-fused"), record("adamw", shown="adamw-foreach"))
