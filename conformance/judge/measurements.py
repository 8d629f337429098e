"""Metrics of the running case, which every comparison of a law records, and their margins: 1 is at a bound."""

import math
from collections.abc import Iterator, Mapping
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
    """Values of the terms of the derivation, of those that are finite."""
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
        terms={name: term for name, term in derived.numbers.items() if math.isfinite(term)} if derived else {},
        ratio=ratio,
    )


def margin(measured: Mapping[str, Measurement]) -> float:
    """Return the margin of the metric that is furthest out, see `margin_of`; 0 if there is none."""
    return max(map(margin_of, measured.values()), default=0.0)


def margin_of(metric: Measurement) -> float:
    """Return the margin of a metric, which depends on its kind.

    - `rounding` and `time`: the value over the upper bound, or the lower bound over the value where that is positive,
      since a ratio may be too small;
    - `memory` between two bounds: the distance of the value from their middle over half of their distance. A stray
      buffer as large as the gap between the bounds scores the same, whatever the total. Without a positive lower bound
      there is no gap: then it is the value over the upper bound; without an upper bound, the lower bound over the
      value;
    - `exact`: as `rounding` inside of the bounds, infinite outside.

    For any kind it is 0 or infinite where both bounds are equal, and infinite for a value that is not finite.
    """
    value, lower, upper = metric.value, metric.lower, metric.upper
    if value is None:
        return math.inf
    if lower is not None and lower == upper:
        return 0.0 if value == lower else math.inf
    if metric.kind == "memory" and lower and upper is not None:
        return abs(value - (lower + upper) / 2) / ((upper - lower) / 2)
    quotient = max(_above(value, upper), _below(value, lower))
    return math.inf if metric.kind == "exact" and quotient > 1.0 else quotient


def _above(value: float, upper: float | None) -> float:
    if upper is None or value <= 0:
        return 0.0
    return value / upper if upper > 0 else math.inf


def _below(value: float, lower: float | None) -> float:
    """Return the margin at a lower bound; a negative one bounds a deviation in either direction."""
    if lower is None:
        return 0.0
    if lower < 0:
        return max(0.0, value / lower)
    if lower == 0:
        return math.inf if value < 0 else 0.0
    return lower / value if value > 0 else math.inf
