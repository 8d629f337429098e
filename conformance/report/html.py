"""HTML of a report and of a difference: one file each, which needs no network and no other file.

Templates lie in `templates/`; all extend `base.html.j2`, which has what they share. `law_overview`, `axis_map` and
`plots` prepare the sections of a report.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from conformance.instruments.communication import Communication
from conformance.judge.measurements import Measurement
from conformance.judge.verdicts import BAD, Verdict
from conformance.plan.coverage import Coverage
from conformance.report import failure_text
from conformance.report.axis_map import axis_map, filter_tokens
from conformance.report.cell_facts import CellFacts
from conformance.report.charts import bounds_bar, timeline
from conformance.report.coverage import AXIS_HEADERS, LAW_HEADERS, TOTAL_HEADERS, axis_rows, law_rows, total_rows
from conformance.report.diff import Difference
from conformance.report.diff_text import (
    COVERAGE_HEADERS,
    METRIC_HEADERS,
    SIDE_HEADERS,
    VERDICT_HEADERS,
    coverage_rows,
    metric_rows,
    side_rows,
    summary,
    title,
    verdict_rows,
)
from conformance.report.failure_groups import FailureGroup, failure_groups
from conformance.report.headline import headline
from conformance.report.law_overview import Family, families_of
from conformance.report.links import linked
from conformance.report.plots import loss_plots, memory_plots, traffic_plots
from conformance.report.schema import CaseResult, Report
from conformance.report.versions import VersionTable
from conformance.report.wording import bounds_text, counted, derivation_text, is_outside, value_text

_SHORT = {
    Verdict.UNSUPPORTED.value: "n/a",
    Verdict.UNEXPECTED_PASS.value: "xpass",
    Verdict.QUALITY_WARNING.value: "drifted",
}
"""Verdicts as they are written in the narrow columns of the grid."""


def html_report(report: Report, *, baseline: Report | None = None) -> str:
    """Return the HTML report, from what report.json has alone; losses are overlaid with those of a baseline."""
    families = families_of(report.cases)
    tokens = filter_tokens(list(dict.fromkeys([*(case.cell for case in report.cases), *report.cells])))
    return render(
        "report.html.j2",
        report=report,
        headline=headline(report),
        failures=_failures(failure_groups(report)),
        details=failure_text.details,
        commands=failure_text.commands,
        families=families,
        metrics=_metrics,
        grids=[(family, list(_grid(family))) for family in families],
        map=axis_map(report.cases),
        coverage=_coverage(report.coverage),
        tokens=tokens,
        axes=_filter_axes(tokens),
        verdicts=[verdict.value for verdict in Verdict if verdict.value in report.verdicts],
        short=_SHORT,
        memory=memory_plots(report.cases),
        losses=loss_plots(report.cases, report.cells, baseline.cells if baseline else {}),
        traffic=traffic_plots(report.cases),
        has_baseline=baseline is not None,
        cells=[_cell(name, facts) for name, facts in report.cells.items()],
        environment=list(_facts(report.environment)),
    )


def html_versions(table: VersionTable) -> str:
    """Return laws by version of torch as HTML, with a column for each report."""
    return render("versions.html.j2", table=table)


def html_difference(difference: Difference) -> str:
    """Return the difference of two reports as HTML."""
    return render(
        "diff.html.j2",
        title=title(difference),
        summary=summary(difference),
        verdict="fail" if difference.exit_status else "pass",
        sides=(SIDE_HEADERS, side_rows(difference)),
        verdicts=(VERDICT_HEADERS, verdict_rows(difference)),
        metrics=(METRIC_HEADERS, metric_rows(difference)),
        coverage=(COVERAGE_HEADERS, coverage_rows(difference)),
    )


def render(template: str, **values: Any) -> str:
    """Return the text of a template of this package; values that are no Markup are escaped."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("conformance.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"linked": linked, "counted": counted}
    return environment


def _failures(groups: Sequence[FailureGroup]) -> dict[str, Any]:
    return {
        "title": failure_text.title(groups) if groups else "What failed",
        "summary": failure_text.summary(groups) if groups else "",
        "causes": failure_text.causes(groups),
        "shown": failure_text.MAX_CAUSES,
    }


def _coverage(covered: Coverage) -> dict[str, Any]:
    return {
        "totals": (TOTAL_HEADERS, total_rows(covered)),
        "axes": (AXIS_HEADERS, axis_rows(covered)),
        "laws": (LAW_HEADERS, law_rows(covered)),
    }


def _grid(family: Family) -> Iterator[tuple[str, list[CaseResult | None]]]:
    """Cells on which a law of the family was planned, with the case of each law: those that failed come first."""
    by_cell: dict[str, dict[str, CaseResult]] = {}
    for law in family.laws:
        for case in law.cases:
            by_cell.setdefault(case.cell, {})[law.id] = case
    has_passed = {cell: all(case.verdict not in BAD for case in by_law.values()) for cell, by_law in by_cell.items()}
    for cell in sorted(by_cell, key=lambda cell: (has_passed[cell], cell)):
        yield cell, [by_cell[cell].get(law.id) for law in family.laws]


def _filter_axes(tokens: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Tokens that a reader can filter by, by axis."""
    axes: dict[str, list[str]] = {}
    for token in sorted({token for of_cell in tokens.values() for token in of_cell}):
        axes.setdefault(token.partition("=")[0], []).append(token)
    return axes


def _metrics(case: CaseResult) -> list[dict[str, Any]]:
    return [_metric(name, metric) for name, metric in case.measured.items()]


def _metric(name: str, metric: Measurement) -> dict[str, Any]:
    return {
        "name": name,
        "value": value_text(metric),
        "bounds": bounds_text(metric),
        "at": metric.at,
        "derivation": derivation_text(metric),
        "outside": is_outside(metric),
        "bar": bounds_bar(metric),
    }


def _cell(name: str, facts: CellFacts) -> dict[str, Any]:
    return {
        "id": name,
        "losses": _losses(facts.losses),
        "tokens_per_s": "" if facts.tokens_per_s is None else f"{facts.tokens_per_s:.0f}",
        "communication": _communication(facts.communication),
        "wire": list(facts.wire_bytes.items()),
        "timeline": timeline(facts.schedule),
        "collectives": [f"{number} x {what}" for what, number in facts.collectives.items()],
    }


def _losses(losses: Sequence[float | None]) -> str:
    if not losses:
        return ""
    first, last = ("not finite" if loss is None else f"{loss:.4f}" for loss in (losses[0], losses[-1]))
    return f"{first} to {last}"


def _communication(communication: Communication | None) -> str:
    if communication is None:
        return ""
    exposed_ms, step_ms = 1e3 * communication.exposed_s, 1e3 * communication.step_s
    return f"{exposed_ms:.1f} of {step_ms:.1f} ms, {communication.exposed_share:.0%}"


def _facts(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in environment.items():
        if isinstance(value, Mapping):
            yield name, ", ".join(f"{key} {entry}" for key, entry in value.items() if entry is not None)
        elif value not in (None, ""):
            yield name, str(value)
