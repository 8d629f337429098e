"""Measured values of the running case: every comparison puts its figure here, whether it holds or not."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec


class Measurement(msgspec.Struct, frozen=True):
    """A value with the bounds that the law allows; None where there is none, or where the value is not finite."""

    value: float | None
    lower: float | None
    upper: float | None
    unit: str


_current: ContextVar[dict[str, Measurement] | None] = ContextVar("measurements", default=None)


@contextmanager
def collecting() -> Iterator[dict[str, Measurement]]:
    """Measurements made inside go into the yielded dictionary."""
    measured: dict[str, Measurement] = {}
    token = _current.set(measured)
    try:
        yield measured
    finally:
        _current.reset(token)


def measure(name: str, value: float, *, lower: float | None = None, upper: float | None = None, unit: str) -> None:
    """Put a figure into the report of the running case. Outside of a case it goes nowhere."""
    measured = _current.get()
    if measured is not None:
        finite = value == value and abs(value) != float("inf")
        measured[name] = Measurement(float(value) if finite else None, lower, upper, unit)
