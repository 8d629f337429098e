"""Measurements go to the running case, and carry the derivation of their bound."""

import math

from conformance.bound import bound
from conformance.judge.measurements import Measurement, collecting, measure


def exact(value: float | None, lower: float | None, upper: float | None, unit: str) -> Measurement:
    return Measurement(kind="exact", value=value, lower=lower, upper=upper, unit=unit)


def test_measurements_go_to_the_running_case_only() -> None:
    measure("lost", 1.0, kind="exact", unit="s")
    with collecting() as outer:
        measure("a", 1, kind="exact", lower=0, upper=2, unit="s")
        with collecting() as inner:
            measure("b", math.inf, kind="exact", upper=1.0, unit="s")
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
    assert metric.upper == 2 * 2.0**-24 * 316
    assert metric.formula == "2 e, e = u (3 F + sqrt(tokens))"
    assert metric.terms == {"u": 2.0**-24, "F": 100.0, "tokens": 256}
    assert (metric.kind, metric.at) == ("rounding", "w")
