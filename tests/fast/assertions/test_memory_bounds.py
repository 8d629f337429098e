"""Memory that the model does not know, by version of torch."""

from typing import Any, NoReturn

import pytest

from conformance.assertions import memory_bounds
from conformance.assertions.memory_bounds import bounds_of_ranks
from conformance.oracles.torch_versions import traits_of
from conformance.outcomes import Unsupported
from conformance.plan.cells import Cell


class Measured(Exception):
    """A measurement was asked for."""


def measure(*_: Any, **__: Any) -> NoReturn:
    raise Measured


@pytest.mark.parametrize(
    ("version", "mesh", "in_flight", "outcome"),
    [
        ("2.8.0", "dp1", False, Unsupported),
        ("2.8.0", "dp1", True, Measured),
        ("2.8.0", "dp2", False, Measured),
        ("2.9.1", "dp1", False, Measured),
        ("2.15.0", "pp2-dp2", False, Unsupported),
        ("2.14.0", "pp2-dp2", False, Measured),
    ],
)
def test_what_the_model_does_not_know(
    monkeypatch: pytest.MonkeyPatch, version: str, mesh: str, in_flight: bool, outcome: type[Exception]
) -> None:
    monkeypatch.setattr(memory_bounds, "traits_of", lambda _: traits_of(version))
    cell = Cell(mesh=mesh, accumulation=4 if "pp" in mesh else 1, model="cut" if "pp" in mesh else "tiny")
    with pytest.raises(outcome):
        bounds_of_ranks(measure, cell, in_flight=in_flight)
