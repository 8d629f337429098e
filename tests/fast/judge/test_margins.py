"""Margins of metrics by kind: 1 is at a bound, more is outside."""

from math import inf

import pytest

from conformance.judge.measurements import Kind, Measurement, margin


def margin_of(kind: Kind, value: float | None, lower: float | None, upper: float | None) -> float:
    return margin({"metric": Measurement(kind=kind, value=value, lower=lower, upper=upper, unit="one")})


@pytest.mark.parametrize(
    ("value", "lower", "upper", "expected"),
    [
        (2.0, 0.0, 4.0, 0.5),
        (8.0, 0.0, 4.0, 2.0),
        (None, 0.0, 4.0, inf),
        (1.0, 2.0, 4.0, 2.0),
        (0.0, 2.0, 4.0, inf),
        (-1.0, 2.0, 4.0, inf),
        (-6.0, -4.0, 4.0, 1.5),
        (1.0, None, None, 0.0),
        (-1.0, None, 4.0, 0.0),
    ],
)
def test_rounding_is_measured_by_the_quotient(
    value: float | None, lower: float | None, upper: float | None, expected: float
) -> None:
    assert margin_of("rounding", value, lower, upper) == expected


@pytest.mark.parametrize("kind", ["rounding", "exact", "memory"])
def test_where_one_value_is_right_all_others_are_infinitely_far(kind: Kind) -> None:
    assert margin_of(kind, 3.0, 3.0, 3.0) == 0.0
    assert margin_of(kind, 4.0, 3.0, 3.0) == inf
    assert margin_of(kind, 0.0, 0.0, 0.0) == 0.0
    assert margin_of(kind, 1.0, 0.0, 0.0) == inf


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1_000_000, 1.0), (1_000_064, 0.0), (1_000_128, 1.0), (1_000_256, 3.0), (999_936, 2.0)],
)
def test_memory_is_measured_by_what_the_bounds_leave_open(value: float, expected: float) -> None:
    """A buffer of 128 bytes counts the same beside any amount of other memory."""
    assert margin_of("memory", value, 1_000_000, 1_000_128) == expected


def test_memory_with_one_bound_is_measured_by_the_quotient() -> None:
    assert margin_of("memory", 150.0, 0.0, 100.0) == 1.5
    assert margin_of("memory", 150.0, None, 100.0) == 1.5
    assert margin_of("memory", 100.0, 1600.0, None) == 16.0


def test_exact_metrics_are_infinitely_far_outside() -> None:
    assert margin_of("exact", 50.0, None, 100.0) == 0.5
    assert margin_of("exact", 101.0, None, 100.0) == inf
    assert margin_of("exact", 1.0, 2.0, None) == inf


def test_the_worst_metric_decides() -> None:
    metrics = {
        str(value): Measurement(kind="rounding", value=value, lower=0.0, upper=1.0, unit="") for value in (0.5, 2.0)
    }
    assert margin(metrics) == 2.0
    assert margin({}) == 0.0
