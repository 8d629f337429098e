"""Metrics of the running case: every comparison puts its metric here, whether it holds or not."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import msgspec

from conformance.bound import Bound

Kind = Literal["rounding", "exact", "memory", "time"]
"""What can make a metric differ between two correct runs.

`rounding`: the order of sums. `exact`: nothing, for counts, bits and facts. `memory`: what an allocator leaves open
between the bounds. `time`: the machine.
"""


class Measurement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One metric with the bounds that the law allows."""

    kind: Kind
    value: float | None
    """None if the value is not finite."""
    lower: float | None
    """None where there is no bound."""
    upper: float | None
    unit: str
    at: str = ""
    """Tensor, step or rank at which the metric was worst."""
    formula: str = ""
    """Derivation of the upper bound."""
    terms: dict[str, float] = {}
    """Values of the terms of the derivation."""


_current: ContextVar[dict[str, Measurement] | None] = ContextVar("measurements", default=None)


@contextmanager
def collecting() -> Iterator[dict[str, Measurement]]:
    """Put the measurements that are made inside into the yielded dictionary, by name."""
    measured: dict[str, Measurement] = {}
    token = _current.set(measured)
    try:
        yield measured
    finally:
        _current.reset(token)


def measure(
    name: str,
    value: float,
    *,
    kind: Kind,
    unit: str,
    lower: float | None = None,
    upper: float | Bound | None = None,
    at: str = "",
) -> None:
    """Put a metric into the report of the running case. Outside of a case it goes nowhere."""
    measured = _current.get()
    if measured is None:
        return
    derived = upper if isinstance(upper, Bound) else None
    measured[name] = Measurement(
        kind=kind,
        value=float(value) if math.isfinite(value) else None,
        lower=lower,
        upper=upper.value if isinstance(upper, Bound) else upper,
        unit=unit,
        at=at,
        formula=derived.derivation if derived else "",
        terms=derived.numbers if derived else {},
    )
