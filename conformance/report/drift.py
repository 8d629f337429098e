"""When has a figure moved between two reports, and when is it noise?

A figure moves if it changes by more than what one and the same program shows from run to run:

- what torch decides (bytes, collectives, counts) is the same in every run, but for what a law leaves open by its
  bounds: a change counts if it is more than 1 % and more than the distance between the bounds;
- rounding errors depend on the order of sums, which another version may choose otherwise: they count if they fill their
  bound by a tenth or more, and by another factor than 2;
- times are compared as ratios to a fixed piece of work that the same ranks did in the same run, over all cells: the
  median must move by more than a third, since two processors show a tenth to a quarter between runs of one version.
"""

import math
import statistics
from collections.abc import Iterator, Mapping

import msgspec

from conformance.judge.measurements import Measurement
from conformance.report.cell_facts import CellFacts

EXACT_CHANGE = 0.01
ROUNDING_FACTOR = 2.0
ROUNDING_SHARE = 0.1
TIME_FACTOR = 4 / 3
MIN_CELLS_FOR_TIME = 8


class Moved(msgspec.Struct, frozen=True):
    """A figure that has moved."""

    name: str
    before: float | None
    """None where there was none, or where it was not finite."""
    after: float | None
    unit: str

    @property
    def ratio(self) -> float | None:
        """After over before."""
        return self.after / self.before if self.before and self.after is not None else None


def moved_figures(before: Mapping[str, Measurement], after: Mapping[str, Measurement]) -> list[Moved]:
    """Of one case. Times of the machine are no figures of torch."""
    found = []
    for name in dict.fromkeys([*before, *after]):
        one, other = before.get(name), after.get(name)
        known = other or one
        if known and known.kind != "time" and _has_moved(one, other):
            found.append(Moved(name, one.value if one else None, other.value if other else None, known.unit))
    return found


def _has_moved(before: Measurement | None, after: Measurement | None) -> bool:
    if before is None or after is None or before.value is None or after.value is None:
        return (before.value if before else None) != (after.value if after else None)
    if after.kind == "rounding":
        return _rounding_moved(before, after)
    return _exact_moved(before.value, after.value, open_by=max(_open(before), _open(after)))


def _exact_moved(before: float, after: float, *, open_by: float = 0.0) -> bool:
    change = abs(after - before)
    return change > open_by and change > EXACT_CHANGE * max(abs(before), abs(after))


def _open(figure: Measurement) -> float:
    """What the law does not determine."""
    return figure.upper - figure.lower if figure.upper is not None and figure.lower is not None else 0.0


def _rounding_moved(before: Measurement, after: Measurement) -> bool:
    shares = [_share(before), _share(after)]
    low, high = min(shares), max(shares)
    return high >= ROUNDING_SHARE and high > ROUNDING_FACTOR * low


def _share(figure: Measurement) -> float:
    """Of its bound: for a ratio that may lie on either side of one, by its logarithm."""
    value = figure.value or 0.0
    if figure.lower and figure.upper and figure.lower > 0 and value > 0:
        return abs(math.log(value)) / math.log(figure.upper) if figure.upper > 1 else 0.0
    return abs(value) / figure.upper if figure.upper else 0.0


def moved_facts(before: CellFacts, after: CellFacts) -> list[Moved]:
    """Traffic of one cell, which has neither bounds nor noise."""
    found = []
    for what, unit, one, other in (
        ("wire", "bytes", before.wire_bytes, after.wire_bytes),
        ("number of", "collectives", before.collectives, after.collectives),
    ):
        for name in dict.fromkeys([*one, *other]):
            old, new = one.get(name, 0), other.get(name, 0)
            if _exact_moved(old, new):
                found.append(Moved(f"{what} {name}", old, new, unit))
    return found


def moved_times(before: Mapping[str, CellFacts], after: Mapping[str, CellFacts]) -> Moved | None:
    """The median over all cells of how much longer a step takes, each beside the fixed work of its own run."""
    ratios = list(_time_ratios(before, after))
    if len(ratios) < MIN_CELLS_FOR_TIME:
        return None
    median = statistics.median(ratios)
    if 1 / TIME_FACTOR <= median <= TIME_FACTOR:
        return None
    return Moved(f"time of a step, median of {len(ratios)} cells", 1.0, median, "of the time before")


def _time_ratios(before: Mapping[str, CellFacts], after: Mapping[str, CellFacts]) -> Iterator[float]:
    for cell in before.keys() & after.keys():
        one, other = before[cell], after[cell]
        if one.substrate == other.substrate and one.step_s and other.step_s:
            yield (min(other.step_s) / other.calibration_s) / (min(one.step_s) / one.calibration_s)
