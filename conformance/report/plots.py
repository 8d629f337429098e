"""Plots of the HTML report: memory, traffic and losses, with the bounds of the suite's models drawn in.

Plotted are metrics that laws have compared with bounds, so that each plot belongs to a case and its verdict.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec
from markupsafe import Markup

from conformance.judge.measurements import Measurement
from conformance.report.cell_facts import CellFacts
from conformance.report.charts import bar, bounds_bar, deviations, loss_curve
from conformance.report.schema import CaseResult
from conformance.report.wording import is_outside

_LOSS = re.compile(r"loss\b")
_MIB = 2**20


class Bar(msgspec.Struct, frozen=True):
    """Metric in bytes, as a bar."""

    name: str
    svg: Markup
    """Bar on the scale of all plots of the section, from 0."""
    within: Markup
    """Place of the value between its bounds."""
    label: str
    is_outside: bool


class BarPlot(msgspec.Struct, frozen=True):
    """Metrics in bytes of one case."""

    case: CaseResult
    bars: list[Bar]


class LossPlot(msgspec.Struct, frozen=True):
    """Losses of a cell's run, and their deviations from what was expected."""

    case: CaseResult
    curve: Markup
    """Losses by step; empty where the report has no facts of the cell."""
    deviations: Markup
    """Deviations with their bounds."""
    is_outside: bool


def memory_plots(cases: Sequence[CaseResult]) -> list[BarPlot]:
    """Return bytes of memory that were compared with a model, by case."""
    return _bar_plots(cases, lambda metric: metric.kind == "memory")


def traffic_plots(cases: Sequence[CaseResult]) -> list[BarPlot]:
    """Return bytes of collectives that were compared with the model of traffic, by case."""
    return _bar_plots(cases, lambda metric: metric.kind == "exact")


def loss_plots(
    cases: Sequence[CaseResult], cells: Mapping[str, CellFacts], baseline: Mapping[str, CellFacts]
) -> list[LossPlot]:
    """Return losses that were compared with a bound, by case; `baseline` has facts of an earlier report."""
    plots = []
    for case in cases:
        metrics = {name: metric for name, metric in case.measured.items() if _LOSS.match(name) and metric.upper}
        if metrics:
            losses, earlier = (facts[case.cell].losses if case.cell in facts else [] for facts in (cells, baseline))
            plots.append(
                LossPlot(case, loss_curve(losses, earlier), deviations(metrics), any(map(is_outside, metrics.values())))
            )
    return sorted(plots, key=lambda plot: not plot.is_outside)


def _bar_plots(cases: Sequence[CaseResult], wanted: Callable[[Measurement], bool]) -> list[BarPlot]:
    """Plots of all cases on one scale, those with a metric outside of its bounds first."""
    by_case = [(case, _bytes_with_bounds(case, wanted)) for case in cases]
    largest = max((metric.value or 0.0 for _, metrics in by_case for metric in metrics.values()), default=0.0)
    plots = [
        BarPlot(case, [_bar(name, metric, largest) for name, metric in metrics.items()])
        for case, metrics in by_case
        if metrics
    ]
    return sorted(plots, key=lambda plot: not any(each.is_outside for each in plot.bars))


def _bytes_with_bounds(case: CaseResult, wanted: Callable[[Measurement], bool]) -> dict[str, Measurement]:
    return {
        name: metric
        for name, metric in case.measured.items()
        if wanted(metric) and metric.unit.startswith("bytes") and metric.lower is not None and metric.upper
    }


def _bar(name: str, metric: Measurement, largest: float) -> Bar:
    return Bar(name, bar(metric, largest=largest), bounds_bar(metric), _bytes_text(metric), is_outside(metric))


def _bytes_text(metric: Measurement) -> str:
    """Value in MiB with its distance from the bounds, which may be a few bytes apart."""
    if metric.value is None:
        return "not finite"
    lower, upper = metric.lower or 0.0, metric.upper or 0.0
    text = f"{metric.value / _MIB:.3f} MiB"
    if lower == upper:
        return f"{text}, the model's{f' {metric.value - lower:+,.0f} B' if metric.value != lower else ''}"
    above = f", lower bound {metric.value - lower:+,.0f} B" if lower else ""
    return f"{text}{above}, upper bound {metric.value - upper:+,.0f} B"
