"""HTML of a report and of a difference: one file each, which needs no network and no other file.

Templates lie in `templates/`; all extend `base.html.j2`, which has what they share.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from conformance.instruments.communication import Communication
from conformance.judge.law import in_order
from conformance.judge.measurements import Measurement
from conformance.judge.verdicts import Verdict
from conformance.report.cell_facts import CellFacts
from conformance.report.charts import bounds_bar, loss_curve, memory_bar, timeline
from conformance.report.diff import Difference
from conformance.report.diff_text import (
    METRIC_HEADERS,
    SIDE_HEADERS,
    VERDICT_HEADERS,
    metric_rows,
    side_rows,
    summary,
    verdict_rows,
)
from conformance.report.schema import CaseResult, Report
from conformance.report.wording import bounds_text, derivation_text, is_outside, value_text

_BAD = (Verdict.FAIL, Verdict.TIMEOUT, Verdict.CRASH, Verdict.ERROR, Verdict.UNEXPECTED_PASS)
_SHORT = {
    Verdict.UNSUPPORTED.value: "n/a",
    Verdict.UNEXPECTED_PASS.value: "xpass",
    Verdict.QUALITY_WARNING.value: "drifted",
}
"""Verdicts as they are written in the narrow columns of the grid."""
_OUTCOMES = {0: "conformant", 1: "not conformant", 3: "the suite failed", 4: "usage", 5: "incomplete"}
_PEAK = "peak of "


def html_report(report: Report, *, baseline: Report | None = None) -> str:
    """Return the HTML report, from what report.json has alone; losses are overlaid with those of a baseline."""
    laws = sorted({case.law for case in report.cases}, key=in_order)
    known = baseline.cells if baseline else {}
    return render(
        "report.html.j2",
        report=report,
        title=f"torch {report.environment['packages']['torch']}, profile {report.profile}, {report.started}",
        outcome=_OUTCOMES.get(report.exit_code, "?"),
        has_baseline=bool(known),
        cannot_show=report.environment.get("cannot_show", ""),
        verdicts=[verdict.value for verdict in Verdict if verdict.value in report.verdicts],
        families=list(_families(report.cases)),
        laws=[_law(law, report.cases) for law in laws],
        grid=_grid(report.cases, laws),
        short=_SHORT,
        memory=list(_memory(report.cases)),
        cells=[_cell(name, facts, known.get(name)) for name, facts in report.cells.items()],
        environment=list(_facts(report.environment)),
    )


def html_difference(difference: Difference) -> str:
    """Return the difference of two reports as HTML."""
    return render(
        "diff.html.j2",
        summary=summary(difference),
        verdict="fail" if difference.exit_status else "pass",
        sides=(SIDE_HEADERS, side_rows(difference)),
        verdicts=(VERDICT_HEADERS, verdict_rows(difference)),
        metrics=(METRIC_HEADERS, metric_rows(difference)),
    )


def render(template: str, **values: Any) -> str:
    """Return the text of a template of this package; values that are no Markup are escaped."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("conformance.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )


def _families(cases: Sequence[CaseResult]) -> Iterator[dict[str, Any]]:
    for name in sorted({case.law.partition("-")[0] for case in cases}):
        of_family = [case for case in cases if case.law.partition("-")[0] == name]
        counts = Counter(case.verdict for case in of_family)
        yield {"name": name, "counts": counts, "seconds": sum(case.duration_s for case in of_family)}


def _law(law: str, cases: Sequence[CaseResult]) -> dict[str, Any]:
    of_law = [case for case in cases if case.law == law]
    shown = [
        {"result": case, "metrics": [_metric(name, metric) for name, metric in case.measured.items()]}
        for case in of_law
    ]
    return {"id": law, "must": of_law[0].must, "cases": shown, "bad": any(case.verdict in _BAD for case in of_law)}


def _grid(cases: Sequence[CaseResult], laws: Sequence[str]) -> list[tuple[str, list[CaseResult | None]]]:
    by_cell: dict[str, dict[str, CaseResult]] = {}
    for case in cases:
        by_cell.setdefault(case.cell, {})[case.law] = case
    return [(cell, [by_law.get(law) for law in laws]) for cell, by_law in sorted(by_cell.items())]


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


def _memory(cases: Sequence[CaseResult]) -> Iterator[dict[str, Any]]:
    by_cell = {case.cell: _peaks(case.measured) for case in cases if case.law == "MEM-1" and case.measured}
    largest = max((metric.value or 0.0 for peaks in by_cell.values() for metric in peaks.values()), default=0.0)
    for cell, peaks in by_cell.items():
        if peaks and largest:
            yield {"cell": cell, "bar": memory_bar(peaks, largest_bytes=largest)}


def _peaks(measured: Mapping[str, Measurement]) -> dict[str, Measurement]:
    return {name.removeprefix(_PEAK): metric for name, metric in measured.items() if name.startswith(_PEAK)}


def _cell(name: str, facts: CellFacts, baseline: CellFacts | None) -> dict[str, Any]:
    return {
        "id": name,
        "losses": loss_curve(facts.losses, baseline.losses if baseline else ()),
        "tokens_per_s": "" if facts.tokens_per_s is None else f"{facts.tokens_per_s:.0f}",
        "communication": _communication(facts.communication),
        "wire": list(facts.wire_bytes.items()),
        "timeline": timeline(facts.schedule),
        "collectives": [f"{number} x {what}" for what, number in facts.collectives.items()],
    }


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
