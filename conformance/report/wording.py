"""Wording that texts and HTML share: numbers with nouns, shares, axis values, and metrics with their bounds."""

from conformance.judge.measurements import Measurement
from conformance.plan.cells import AxisValue
from conformance.plan.coverage import Tally


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 case`, `4 cases`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def spelled(value: AxisValue) -> str:
    """Return a value as a selection spells it: `true` for True."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def share_text(tally: Tally) -> str:
    """Return the share that is seen, `98.7 %`: rounded down, so that 100 % means all; `-` if nothing is possible."""
    return f"{1000 * tally.seen // tally.possible / 10:g} %" if tally.possible else "-"


def value_text(metric: Measurement) -> str:
    """Return value and unit: `0.00124 relative deviation`."""
    return "not finite" if metric.value is None else f"{metric.value:.6g} {metric.unit}".rstrip()


def bounds_text(metric: Measurement) -> str:
    """Return both bounds, `0 to 1.95e-05`, with nothing for one that is missing; empty if both are."""
    if metric.lower is None and metric.upper is None:
        return ""
    return " to ".join("" if bound is None else f"{bound:.6g}" for bound in (metric.lower, metric.upper))


def derivation_text(metric: Measurement) -> str:
    """Return the upper bound with formula and terms; empty if it is not derived from terms.

    Example: `bound 1.95e-05 = u (3 F + sqrt(tokens)); u = 5.96e-08, F = 105, tokens = 256`.
    """
    if metric.upper is None or not metric.terms:
        return ""
    return f"bound {metric.upper:.3g} = {metric.formula}; {terms_text(metric)}"


def terms_text(metric: Measurement) -> str:
    """Return the terms of the upper bound: `u = 5.96e-08, F = 105, tokens = 256`."""
    return ", ".join(f"{name} = {value:.3g}" for name, value in metric.terms.items())


def is_outside(metric: Measurement) -> bool:
    """Return whether a metric violates one of its bounds, or is not finite where there is one."""
    if metric.value is None:
        return metric.lower is not None or metric.upper is not None
    too_small = metric.lower is not None and metric.value < metric.lower
    too_large = metric.upper is not None and metric.value > metric.upper
    return too_small or too_large
