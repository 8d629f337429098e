"""Drift of metrics between two reports, told from noise.

A metric has drifted if it changed by more than one and the same program shows from run to run. That depends on its
kind (`judge.measurements.Kind`):

- `exact` and `memory`: what torch decides (bytes, collectives, counts) is the same in every run, but for what a law
  leaves open by its bounds. A change counts if it is more than 1 % and more than the distance between the bounds;
- `rounding`: rounding errors depend on the order of sums, which another version may choose otherwise. They count if
  they fill their bound by a tenth or more, and by another factor than 2;
- `time`: never, for a single metric. Steps are compared as ratios to a fixed piece of work that the same ranks did in
  the same run, over all cells: the median must change by more than a third, since two processors show a tenth to a
  quarter between runs of one version.
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


class Drifted(msgspec.Struct, frozen=True):
    """Metric that has drifted."""

    name: str
    before: float | None
    """None where there was no value, or where the value was not finite."""
    after: float | None
    unit: str

    @property
    def ratio(self) -> float | None:
        """Quotient of the value after and the value before; None if there is none."""
        return self.after / self.before if self.before and self.after is not None else None


def drifted_metrics(before: Mapping[str, Measurement], after: Mapping[str, Measurement]) -> list[Drifted]:
    """Return the metrics of one case that have drifted; times of the machine never do."""
    drifted = []
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        known = new or old
        if known and known.kind != "time" and _has_drifted(old, new):
            drifted.append(Drifted(name, old.value if old else None, new.value if new else None, known.unit))
    return drifted


def _has_drifted(before: Measurement | None, after: Measurement | None) -> bool:
    if before is None or after is None or before.value is None or after.value is None:
        return (before.value if before else None) != (after.value if after else None)
    if after.kind == "rounding":
        return _rounding_drifted(before, after)
    return _exact_drifted(before.value, after.value, slack=max(_slack(before), _slack(after)))


def _exact_drifted(before: float, after: float, *, slack: float = 0.0) -> bool:
    change = abs(after - before)
    return change > slack and change > EXACT_CHANGE * max(abs(before), abs(after))


def _slack(metric: Measurement) -> float:
    """Distance between the bounds, which a law leaves open."""
    return metric.upper - metric.lower if metric.upper is not None and metric.lower is not None else 0.0


def _rounding_drifted(before: Measurement, after: Measurement) -> bool:
    low, high = sorted([_filled_share(before), _filled_share(after)])
    return high >= ROUNDING_SHARE and high > ROUNDING_FACTOR * low


def _filled_share(metric: Measurement) -> float:
    """Share of its bound that a metric fills: by its logarithm for a ratio, which may lie on either side of 1."""
    value = metric.value or 0.0
    if metric.lower and metric.upper and metric.lower > 0 and value > 0:
        return abs(math.log(value)) / math.log(metric.upper) if metric.upper > 1 else 0.0
    return abs(value) / metric.upper if metric.upper else 0.0


def drifted_facts(before: CellFacts, after: CellFacts) -> list[Drifted]:
    """Return what has drifted of one cell's traffic, which has neither bounds nor noise."""
    bytes_sent = _drifted_counts("wire", before.wire_bytes, after.wire_bytes, unit="bytes")
    collectives = _drifted_counts("number of", before.collectives, after.collectives, unit="collectives")
    return [*bytes_sent, *collectives]


def _drifted_counts(what: str, before: Mapping[str, int], after: Mapping[str, int], *, unit: str) -> Iterator[Drifted]:
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, 0), after.get(name, 0)
        if _exact_drifted(old, new):
            yield Drifted(f"{what} {name}", old, new, unit)


def drifted_times(before: Mapping[str, CellFacts], after: Mapping[str, CellFacts]) -> Drifted | None:
    """Return the drift of the time of a step: the median over all cells, relative to the fixed work of each run.

    None if there are too few cells, or if the median has not drifted.
    """
    ratios = list(_time_ratios(before, after))
    if len(ratios) < MIN_CELLS_FOR_TIME:
        return None
    median = statistics.median(ratios)
    if 1 / TIME_FACTOR <= median <= TIME_FACTOR:
        return None
    return Drifted(f"time of a step, median of {len(ratios)} cells", 1.0, median, "of the time before")


def _time_ratios(before: Mapping[str, CellFacts], after: Mapping[str, CellFacts]) -> Iterator[float]:
    for cell in before.keys() & after.keys():
        old, new = before[cell], after[cell]
        if old.substrate == new.substrate and old.step_s and new.step_s:
            yield _relative_step_time(new) / _relative_step_time(old)


def _relative_step_time(facts: CellFacts) -> float:
    return min(facts.step_s) / facts.calibration_s
