"""Sections of report.html as data: laws by family with their margins, the map of axes, and plots.

Plotted are metrics that laws have compared with bounds, so that each plot belongs to a case and its verdict.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations_with_replacement, groupby

import msgspec

from conformance.judge.measurements import Measurement, margin_of
from conformance.judge.verdicts import BAD, Verdict
from conformance.plan.cells import AxisValue, Cell, cell_from_id
from conformance.plan.mesh import AxisError
from conformance.plan.scopes import in_order
from conformance.report.facts import CellFacts
from conformance.report.schema import CaseResult
from conformance.report.wording import is_outside, spelled

NOT_JUDGED = frozenset({Verdict.UNSUPPORTED, Verdict.NOT_RUN})
"""Verdicts on cases of which no law has judged a run."""
_MIN_RATIO = 1.01
"""Smallest multiple of a bound that is written as a number."""
_MAX_RATIO = 1_000_000
"""Largest multiple of a bound that is written as a number."""
_MIN_SHARE = 1e-4
"""Smallest share that is written as a number, without an exponent."""
_BELOW_ALL = 99.9
"""Largest percentage that is written for less than all."""
_DIMENSIONS = ("pp", "dp_shard", "dp_replicate", "tp")
_DEFAULTS: dict[str, AxisValue] = {**dict.fromkeys(_DIMENSIONS, 1), **msgspec.structs.asdict(Cell())}
_AXES = tuple(name for name in _DEFAULTS if name != "mesh")
_LOSS = re.compile(r"loss\b")
_MIB = 2**20


# Laws


class Narrowest(msgspec.Struct, frozen=True):
    """Metric of a law with the least room to its bound, over all cases."""

    text: str
    """Room of the metric, such as `43.1 % of the bound`; `exact` if the law leaves no room, empty without bounds."""
    share: float | None = None
    """Margin of the metric, see `measurements.margin_of`; None for `exact`, without bounds, and for no finite share."""
    metric: str = ""
    """Name of the metric, and where it was worst."""
    case: str = ""
    """Id of the case with that metric; empty for `exact`."""


class LawOverview(msgspec.Struct, frozen=True):
    """Cases of one law, at least one; those that speak against conformance first."""

    cases: list[CaseResult]

    @property
    def id(self) -> str:
        """Id of the law."""
        return self.cases[0].law

    @property
    def is_bad(self) -> bool:
        """True if any case speaks against conformance."""
        return any(case.verdict in BAD for case in self.cases)


class Family(msgspec.Struct, frozen=True):
    """Laws whose ids have the same beginning."""

    name: str
    laws: list[LawOverview]

    @property
    def cases(self) -> list[CaseResult]:
        """Cases of all laws."""
        return [case for law in self.laws for case in law.cases]


def families_of(cases: Sequence[CaseResult]) -> list[Family]:
    """Return all laws of a report by family, in the order of ids."""
    ordered = sorted(cases, key=lambda case: in_order(case.law))
    by_law = (list(group) for _, group in groupby(ordered, key=lambda case: case.law))
    laws = [LawOverview(sorted(group, key=lambda case: case.verdict not in BAD)) for group in by_law]
    return [Family(name, list(group)) for name, group in groupby(laws, key=lambda law: law.id.partition("-")[0])]


def narrowest_margin(cases: Sequence[CaseResult]) -> Narrowest:
    """Return the metric with the least room to its bound."""
    bounded = [(margin_of(metric), name, metric, case) for case in cases for name, metric in _bounded(case)]
    with_room = [entry for entry in bounded if entry[2].lower != entry[2].upper or entry[0] > 1.0]
    if not with_room:
        return Narrowest("exact" if bounded else "")
    margin, name, metric, case = max(with_room, key=lambda entry: entry[0])
    share = margin if math.isfinite(margin) else None
    return Narrowest(_room(margin, metric), share, f"{name}{f' at {metric.at}' if metric.at else ''}", case.id)


def _bounded(case: CaseResult) -> Iterator[tuple[str, Measurement]]:
    for name, metric in case.measured.items():
        if metric.lower is not None or metric.upper is not None:
            yield name, metric


def _room(margin: float, metric: Measurement) -> str:
    """Room of a metric in words; a memory between two bounds is a distance, since a bound of 0 % is no model's."""
    value, lower, upper = metric.value, metric.lower, metric.upper
    if is_outside(metric):
        return "outside" if math.isinf(margin) or margin < _MIN_RATIO else f"{times_text(margin)} the bound"
    if metric.kind == "memory" and value is not None and lower and upper is not None:
        is_low = value - lower <= upper - value
        distance, side = (value - lower, "above the lower") if is_low else (upper - value, "below the upper")
        return f"{distance:.0f} bytes {side} bound"
    return "at the bound" if margin == 1.0 else f"{percent_text(margin)} of the bound"


def times_text(ratio: float) -> str:
    """Return a ratio of three significant digits, without an exponent: `51,300 times`, `over 1,000,000 times`."""
    if ratio > _MAX_RATIO:
        return f"over {_MAX_RATIO:,} times"
    return f"{float(f'{ratio:.3g}'):,.0f} times" if ratio >= 1000 else f"{ratio:.3g} times"


def percent_text(share: float) -> str:
    """Return a share of at most 1 as a percentage of three significant digits: `43.1 %`; `under 0.01 %` for less."""
    if 0 < share < _MIN_SHARE:
        return f"under {100 * _MIN_SHARE:g} %"
    return f"{min(100 * share, _BELOW_ALL) if share < 1 else 100 * share:.3g} %"


# Axes


class AxisPair(msgspec.Struct, frozen=True):
    """Two axes that cases have met; the same axis twice stands for all cases with that feature."""

    first: str
    second: str
    judged: int
    failed: int


class AxisMap(msgspec.Struct, frozen=True):
    """Triangle of pairs of axes: which features of cells were judged together, and which pairs have failed.

    A feature is an axis with another value than its default, or a dimension of the mesh with more than one rank.
    """

    axes: list[str]
    """Axes with a feature in any judged case."""
    rows: list[tuple[str, list[AxisPair | None]]]
    """Pairs of each axis with the axes up to itself; None where no case has both features."""
    unknown: int
    """Number of judged cases whose cell id is none of this version's."""


def axis_map(cases: Sequence[CaseResult]) -> AxisMap:
    """Return the map of all cases that were judged."""
    judged, failed, unknown = Counter[tuple[str, str]](), Counter[tuple[str, str]](), 0
    for case in cases:
        if case.verdict in NOT_JUDGED:
            continue
        values = axes_of(case.cell)
        unknown += values is None
        pairs = list(combinations_with_replacement(_features(values or {}), 2))
        judged.update(pairs)
        failed.update(pairs if case.verdict in BAD else ())
    axes = [axis for axis in _AXES if (axis, axis) in judged]
    rows = [
        (
            axis,
            [
                AxisPair(axis, other, judged[other, axis], failed[other, axis]) if (other, axis) in judged else None
                for other in axes[: index + 1]
            ],
        )
        for index, axis in enumerate(axes)
    ]
    return AxisMap(axes, rows, unknown)


def axes_of(cell_id: str) -> dict[str, str] | None:
    """Return the value of each axis and of each dimension of the mesh, as the matrix spells it; None for no cell."""
    try:
        facts = cell_from_id(cell_id).facts()
    except AxisError:
        return None
    return {axis: spelled(facts[axis]) for axis in _AXES}


def filter_tokens(cells: Sequence[str]) -> dict[str, list[str]]:
    """Return the words by which the filter finds each cell: `axis=value` of each axis with several values in cells.

    A feature is also there without its value, `axis`.
    """
    known = {cell: axes for cell in cells if (axes := axes_of(cell)) is not None}
    values: dict[str, set[str]] = defaultdict(set)
    for axes in known.values():
        for axis, value in axes.items():
            values[axis].add(value)
    return {
        cell: [f"{axis}={value}" for axis, value in axes.items() if len(values[axis]) > 1] + _features(axes)
        for cell, axes in known.items()
    }


def _features(axes: Mapping[str, str]) -> list[str]:
    """Return the axes that do not have their defaults."""
    return [axis for axis, value in axes.items() if value != spelled(_DEFAULTS[axis])]


# Plots


class BytesPlot(msgspec.Struct, frozen=True):
    """Metrics in bytes of one case, with both bounds."""

    case: CaseResult
    metrics: dict[str, Measurement]
    largest: float
    """Largest value of all plots of the section, which have one scale."""


class LossPlot(msgspec.Struct, frozen=True):
    """Losses of a cell's run, and their deviations from the expected losses."""

    case: CaseResult
    losses: list[float | None]
    """Losses by step; empty where the report has no facts of the cell."""
    earlier: list[float | None]
    """Losses of an earlier report."""
    metrics: dict[str, Measurement]
    """Deviations with their bounds."""


def memory_plots(cases: Sequence[CaseResult]) -> list[BytesPlot]:
    """Return bytes of memory that were compared with a model, by case."""
    return _bytes_plots(cases, "memory")


def traffic_plots(cases: Sequence[CaseResult]) -> list[BytesPlot]:
    """Return bytes of collectives that were compared with the model of traffic, by case."""
    return _bytes_plots(cases, "exact")


def loss_plots(
    cases: Sequence[CaseResult], cells: Mapping[str, CellFacts], baseline: Mapping[str, CellFacts]
) -> list[LossPlot]:
    """Return losses that were compared with a bound, by case; `baseline` has facts of an earlier report."""
    plots = []
    for case in cases:
        metrics = {name: metric for name, metric in case.measured.items() if _LOSS.match(name) and metric.upper}
        if metrics:
            losses, earlier = (facts[case.cell].losses if case.cell in facts else [] for facts in (cells, baseline))
            plots.append(LossPlot(case, losses, earlier, metrics))
    return sorted(plots, key=_outside_first)


def bytes_text(metric: Measurement) -> str:
    """Return the value in MiB with its distance from the bounds, which may be a few bytes apart."""
    if metric.value is None:
        return "not finite"
    lower, upper = metric.lower or 0.0, metric.upper or 0.0
    text = f"{metric.value / _MIB:.3f} MiB"
    if lower == upper:
        return f"{text}, as modelled{f' {metric.value - lower:+,.0f} B' if metric.value != lower else ''}"
    above = f", lower bound {metric.value - lower:+,.0f} B" if lower else ""
    return f"{text}{above}, upper bound {metric.value - upper:+,.0f} B"


def _bytes_plots(cases: Sequence[CaseResult], kind: str) -> list[BytesPlot]:
    by_case = [(case, metrics) for case in cases if (metrics := _bytes_with_bounds(case, kind))]
    largest = max((metric.value or 0.0 for _, metrics in by_case for metric in metrics.values()), default=0.0)
    return sorted([BytesPlot(case, metrics, largest) for case, metrics in by_case], key=_outside_first)


def _bytes_with_bounds(case: CaseResult, kind: str) -> dict[str, Measurement]:
    return {
        name: metric
        for name, metric in case.measured.items()
        if metric.kind == kind and metric.unit.startswith("bytes") and metric.lower is not None and metric.upper
    }


def has_outside(plot: BytesPlot | LossPlot) -> bool:
    """Return whether any metric of a plot is outside of its bounds; such plots come first."""
    return any(map(is_outside, plot.metrics.values()))


def _outside_first(plot: BytesPlot | LossPlot) -> bool:
    return not has_outside(plot)
