"""Margins: distances of metrics from their bounds, where 1 is at a bound and more is outside."""

import math
from collections.abc import Mapping

from conformance.judge.measurements import Measurement


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
