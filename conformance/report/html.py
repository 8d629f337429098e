"""report.html: one file with everything in it, from report.json alone."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from conformance.instruments.communication import Communication
from conformance.judge.law import in_order
from conformance.judge.measurements import Measurement
from conformance.judge.verdicts import Verdict
from conformance.report.cell_facts import CellFacts
from conformance.report.charts import bounds_bar, loss_curve, memory_bar, timeline
from conformance.report.schema import CaseResult, Report

_BAD = (Verdict.FAIL, Verdict.TIMEOUT, Verdict.CRASH, Verdict.ERROR, Verdict.UNEXPECTED_PASS)
_SHORT = {
    Verdict.UNSUPPORTED.value: "n/a",
    Verdict.UNEXPECTED_PASS.value: "xpass",
    Verdict.QUALITY_WARNING.value: "moved",
}
"""For the narrow columns of the grid."""
_OUTCOMES = {0: "conformant", 1: "not conformant", 3: "the suite failed", 4: "usage", 5: "incomplete"}
_PEAK = "peak of "


def report_page(report: Report, *, baseline: Report | None = None) -> str:
    """HTML that needs no network and no other file; losses are drawn beside those of a baseline."""
    environment = Environment(
        loader=PackageLoader("conformance.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    laws = sorted({case.law for case in report.cases}, key=in_order)
    packages = report.environment["packages"]
    known = baseline.cells if baseline else {}
    return environment.get_template("report.html.j2").render(
        report=report,
        title=f"torch {packages['torch']}, profile {report.profile}, {report.started}",
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


def _families(cases: Sequence[CaseResult]) -> Iterator[dict[str, Any]]:
    for name in sorted({case.law.partition("-")[0] for case in cases}):
        mine = [case for case in cases if case.law.partition("-")[0] == name]
        counts = Counter(case.verdict for case in mine)
        yield {"name": name, "counts": counts, "seconds": sum(case.duration_s for case in mine)}


def _law(law: str, cases: Sequence[CaseResult]) -> dict[str, Any]:
    mine = [case for case in cases if case.law == law]
    shown = [
        {
            "id": case.id,
            "cell": case.cell,
            "verdict": case.verdict,
            "reason": case.reason,
            "repro": case.repro,
            "substrate": case.substrate,
            "duration_s": case.duration_s,
            "figures": [_figure(name, figure) for name, figure in case.measured.items()],
        }
        for case in mine
    ]
    return {"id": law, "must": mine[0].must, "cases": shown, "bad": any(case.verdict in _BAD for case in mine)}


def _grid(cases: Sequence[CaseResult], laws: Sequence[str]) -> list[tuple[str, list[CaseResult | None]]]:
    by_cell: dict[str, dict[str, CaseResult]] = {}
    for case in cases:
        by_cell.setdefault(case.cell, {})[case.law] = case
    return [(cell, [found.get(law) for law in laws]) for cell, found in sorted(by_cell.items())]


def _figure(name: str, figure: Measurement) -> dict[str, Any]:
    bounds = " to ".join("" if bound is None else f"{bound:.6g}" for bound in (figure.lower, figure.upper))
    has_bounds = figure.lower is not None or figure.upper is not None
    return {
        "name": name,
        "value": "not finite" if figure.value is None else f"{figure.value:.6g}",
        "unit": figure.unit,
        "bounds": bounds if has_bounds else "",
        "bar": bounds_bar(figure),
    }


def _memory(cases: Sequence[CaseResult]) -> Iterator[dict[str, Any]]:
    peaks = {case.cell: _peaks(case.measured) for case in cases if case.law == "MEM-1" and case.measured}
    largest = max((figure.value or 0.0 for found in peaks.values() for figure in found.values()), default=0.0)
    for cell, found in peaks.items():
        if found and largest:
            yield {"cell": cell, "bar": memory_bar(found, largest=largest)}


def _peaks(measured: Mapping[str, Measurement]) -> dict[str, Measurement]:
    return {name.removeprefix(_PEAK): figure for name, figure in measured.items() if name.startswith(_PEAK)}


def _cell(name: str, facts: CellFacts, baseline: CellFacts | None) -> dict[str, Any]:
    return {
        "id": name,
        "losses": loss_curve(facts.losses, baseline.losses if baseline else ()),
        "tokens_per_s": "" if facts.tokens_per_s is None else f"{facts.tokens_per_s:.0f}",
        "communication": _communication(facts.communication),
        "wire": list(facts.wire_bytes.items()),
        "timeline": timeline(facts.schedule),
        "schedule": Markup("<br>").join(f"{number} x {what}" for what, number in facts.collectives.items()),
    }


def _communication(found: Communication | None) -> str:
    if found is None:
        return ""
    share = f"{found.exposed_share:.0%}"
    return f"{1e3 * found.exposed_s:.1f} of {1e3 * found.step_s:.1f} ms, {share}"


def _facts(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in environment.items():
        if isinstance(value, Mapping):
            yield name, ", ".join(f"{key} {found}" for key, found in value.items() if found is not None)
        elif value not in (None, ""):
            yield name, str(value)
