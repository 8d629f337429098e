"""Metrics of the running case: every comparison of a law records one, whether it holds or not."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import msgspec

from conformance.bound import Bound

Kind = Literal["rounding", "exact", "memory", "time"]
"""Cause by which a metric may differ between two correct runs.

`rounding`: the order of sums. `exact`: none; counts, bits and facts are equal. `memory`: freedom of the allocator
between the bounds. `time`: the machine.
"""


class Measurement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Metric with the bounds that a law allows."""

    kind: Kind
    value: float | None
    """Value of the metric; None if not finite."""
    lower: float | None
    """Lower bound, or None."""
    upper: float | None
    """Upper bound, or None."""
    unit: str
    at: str = ""
    """Tensor, step or rank at which the metric was worst."""
    formula: str = ""
    """Derivation of the upper bound."""
    terms: dict[str, float] = {}
    """Values of the terms of the derivation."""
    ratio: float | None = None
    """Ratio of the measured to the expected value where the metric was worst.

    None where the bounds hold, where one value is no multiple of the other, and where only rounding differs."""


_current: ContextVar[dict[str, Measurement] | None] = ContextVar("measurements", default=None)


@contextmanager
def collecting() -> Iterator[dict[str, Measurement]]:
    """Collect the measurements made in the context, by name, in the dictionary that the context yields."""
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
    ratio: float | None = None,
) -> None:
    """Record a metric of the running case; does nothing outside of a case."""
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
        ratio=ratio,
    )
