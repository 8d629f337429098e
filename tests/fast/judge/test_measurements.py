"""Measurements go to the running case, carry the derivation of their bound, and have a margin: 1 is at the bound."""

import math
from math import inf

import msgspec
import pytest

from conformance.bound import bound
from conformance.judge.measurements import Kind, Measurement, collecting, margin, measure


def exact(value: float | None, lower: float | None, upper: float | None, unit: str) -> Measurement:
    return Measurement(kind="exact", value=value, lower=lower, upper=upper, unit=unit)


def test_measurements_go_to_the_running_case_only() -> None:
    measure("lost", 1.0, kind="exact", unit="s")
    with collecting() as outer:
        measure("a", 1, kind="exact", lower=0, upper=2, unit="s")
        with collecting() as inner:
            measure("b", inf, kind="exact", upper=1.0, unit="s")
            measure("c", math.nan, kind="exact", unit="s")
        measure("a", 2, kind="exact", unit="m")
        measure("scaled", 2, kind="exact", unit="m", ratio=0.5)
    measure("lost", 1.0, kind="exact", unit="s")
    assert outer.pop("scaled").ratio == 0.5
    assert outer == {"a": exact(2.0, None, None, "m")}
    assert inner == {"b": exact(None, None, 1.0, "s"), "c": exact(None, None, None, "s")}
    assert type(outer["a"].value) is float


def test_a_measurement_shows_the_formula_of_its_bound_and_the_terms() -> None:
    error = bound("u * (3 * F + sqrt(tokens))", u=2.0**-24, F=100.0, tokens=256)
    with collecting() as measured:
        measure("gradient", 1e-6, kind="rounding", upper=bound("2 * e", e=error), unit="relative deviation", at="w")
    (metric,) = measured.values()
    assert (metric.kind, metric.at, metric.upper) == ("rounding", "w", 2 * 2.0**-24 * 316)
    assert metric.formula == "2 e, e = u (3 F + sqrt(tokens))"
    assert metric.terms == {"u": 2.0**-24, "F": 100.0, "tokens": 256}


def test_a_report_can_have_a_bound_of_a_norm_that_is_not_finite() -> None:
    with collecting() as measured:
        measure("clipped", inf, kind="rounding", upper=bound("c + e / norm", c=0.5, e=1e-6, norm=math.nan), unit="x")
    (read,) = msgspec.json.decode(msgspec.json.encode(measured), type=dict[str, Measurement]).values()
    assert read.terms == {"c": 0.5, "e": 1e-6}
    assert read.upper is None


@pytest.mark.parametrize(
    ("kind", "value", "lower", "upper", "expected"),
    [
        # Rounding is measured by the quotient.
        ("rounding", 2.0, 0.0, 4.0, 0.5),
        ("rounding", 8.0, 0.0, 4.0, 2.0),
        ("rounding", None, 0.0, 4.0, inf),
        ("rounding", 1.0, 2.0, 4.0, 2.0),
        ("rounding", 0.0, 2.0, 4.0, inf),
        ("rounding", -1.0, 2.0, 4.0, inf),
        ("rounding", -6.0, -4.0, 4.0, 1.5),
        ("rounding", 1.0, None, None, 0.0),
        ("rounding", -1.0, None, 4.0, 0.0),
        # Where one value is right, all others are infinitely far.
        *(
            (kind, *row)
            for kind in ("rounding", "exact", "memory")
            for row in ((3.0, 3.0, 3.0, 0.0), (4.0, 3.0, 3.0, inf))
        ),
        *(
            (kind, *row)
            for kind in ("rounding", "exact", "memory")
            for row in ((0.0, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0, inf))
        ),
        # Memory is measured by the room between its bounds: 128 bytes count the same beside any amount of other memory.
        ("memory", 1_000_000, 1_000_000, 1_000_128, 1.0),
        ("memory", 1_000_064, 1_000_000, 1_000_128, 0.0),
        ("memory", 1_000_128, 1_000_000, 1_000_128, 1.0),
        ("memory", 1_000_256, 1_000_000, 1_000_128, 3.0),
        ("memory", 999_936, 1_000_000, 1_000_128, 2.0),
        # With one bound it is the quotient.
        ("memory", 150.0, 0.0, 100.0, 1.5),
        ("memory", 150.0, None, 100.0, 1.5),
        ("memory", 100.0, 1600.0, None, 16.0),
        # Exact metrics are infinitely far outside.
        ("exact", 50.0, None, 100.0, 0.5),
        ("exact", 101.0, None, 100.0, inf),
        ("exact", 1.0, 2.0, None, inf),
    ],
)
def test_margins(kind: Kind, value: float | None, lower: float | None, upper: float | None, expected: float) -> None:
    metric = Measurement(kind=kind, value=value, lower=lower, upper=upper, unit="one")
    inside = Measurement(kind="rounding", value=0.0, lower=0.0, upper=1.0, unit="")
    assert margin({"metric": metric}) == margin({"metric": metric, "inside": inside}) == expected, "the worst decides"
    assert margin({}) == 0.0
