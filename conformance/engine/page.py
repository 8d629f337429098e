"""report.html: one file with everything in it, from report.json alone."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from conformance.engine.cell_facts import CellFacts
from conformance.engine.measurements import Measurement
from conformance.engine.report import CaseResult, Report
from conformance.engine.verdicts import Verdict

_WIDTH, _HEIGHT, _ROW = 120, 10, 13
_BAD = (Verdict.FAIL, Verdict.TIMEOUT, Verdict.CRASH, Verdict.ERROR, Verdict.UNEXPECTED_PASS)
_OUTCOMES = {0: "conformant", 1: "not conformant", 3: "the suite failed", 4: "usage", 5: "incomplete"}
_PEAK = "peak of "
_PHASE_COLOURS = {"forward": "#0969da", "backward": "#8250df", "clip": "#bf8700", "optimizer": "#1a7f37"}


def report_page(report: Report) -> str:
    """HTML that needs no network and no other file."""
    environment = Environment(
        loader=PackageLoader("conformance.engine"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    laws = dict.fromkeys(case.law for case in report.cases)
    packages = report.environment["packages"]
    return environment.get_template("report.html.j2").render(
        report=report,
        title=f"torch {packages['torch']}, profile {report.profile}, {report.started}",
        outcome=_OUTCOMES.get(report.exit_code, "?"),
        cannot_show=report.environment.get("cannot_show", ""),
        verdicts=[verdict.value for verdict in Verdict if verdict.value in report.verdicts],
        families=list(_families(report.cases)),
        laws=[_law(law, report.cases) for law in laws],
        grid=_grid(report.cases, list(laws)),
        memory=list(_memory(report.cases)),
        cells=[_cell(name, facts) for name, facts in report.cells.items()],
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


def bounds_bar(figure: Measurement) -> Markup:
    """Where a value lies: the box is what the law allows, the line is the value; red outside. Empty without bounds."""
    lower, upper, value = figure.lower, figure.upper, figure.value
    if lower is None or upper is None or value is None:
        return Markup()
    inside = lower <= value <= upper
    margin = _WIDTH / 5
    share = (
        (value - lower) / (upper - lower) if upper > lower else (0.5 if inside else math.copysign(2.0, value - lower))
    )
    place = min(max(margin + share * (_WIDTH - 2 * margin), 1.0), _WIDTH - 1.0)
    colour = "var(--good)" if inside else "var(--bad)"
    return Markup(
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{"inside" if inside else "outside"}">'
        f'<rect x="{margin:.0f}" y="2" width="{_WIDTH - 2 * margin:.0f}" height="{_HEIGHT - 4}" fill="none" '
        f'stroke="var(--none)"/><rect x="{place - 1:.1f}" width="3" height="{_HEIGHT}" fill="{colour}"/></svg>'
    )


def _share(value: float, lower: float, upper: float) -> float:
    """0 at the lower bound, 1 at the upper one; where the two are one, the middle, or far off."""
    if upper > lower:
        return (value - lower) / (upper - lower)
    return 0.5 if value == lower else math.copysign(2.0, value - lower)


def _memory(cases: Sequence[CaseResult]) -> Iterator[dict[str, Any]]:
    peaks = {case.cell: _peaks(case.measured) for case in cases if case.law == "MEM-1" and case.measured}
    largest = max((figure.value or 0.0 for found in peaks.values() for figure in found.values()), default=0.0)
    for cell, found in peaks.items():
        if found and largest:
            yield {"cell": cell, "bar": memory_bar(found, largest=largest)}


def _peaks(measured: Mapping[str, Measurement]) -> dict[str, Measurement]:
    return {name.removeprefix(_PEAK): figure for name, figure in measured.items() if name.startswith(_PEAK)}


def memory_bar(peaks: Mapping[str, Measurement], *, largest: float) -> Markup:
    """A line for each phase, as long as its peak; a mark where the model puts it."""
    parts = []
    for row, (phase, figure) in enumerate(peaks.items()):
        length, predicted = (260 * (value or 0.0) / largest for value in (figure.value, figure.lower))
        label = f"{phase} {(figure.value or 0.0) / 2**20:.2f} MiB, model {(figure.lower or 0.0) / 2**20:.2f}"
        colour, top = _PHASE_COLOURS.get(phase, "var(--bar)"), row * _ROW
        parts.append(
            f'<rect y="{top + 2}" width="{length:.1f}" height="{_ROW - 4}" fill="{colour}"/>'
            f'<rect x="{predicted:.1f}" y="{top}" width="2" height="{_ROW}" fill="CanvasText"/>'
            f'<text x="{max(length, predicted) + 6:.0f}" y="{top + 10}">{label}</text>'
        )
    return Markup(f'<svg width="520" height="{_ROW * len(peaks)}" role="img">{"".join(parts)}</svg>')


def _cell(name: str, facts: CellFacts) -> dict[str, Any]:
    return {
        "id": name,
        "losses": loss_curve(facts.losses),
        "tokens_per_s": "" if facts.tokens_per_s is None else f"{facts.tokens_per_s:.0f}",
        "wire": list(facts.wire_bytes.items()),
        "schedule": Markup("<br>").join(f"{number} x {what}" for what, number in facts.collectives.items()),
    }


def loss_curve(losses: Sequence[float | None]) -> Markup:
    """A line over the steps, with first and last value; empty if one is not finite."""
    values = [value for value in losses if value is not None]
    if len(values) < len(losses) or not values:
        return Markup()
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    points = " ".join(f"{10 + 15 * step},{22 - 18 * (value - low) / span:.1f}" for step, value in enumerate(values))
    label = f"{values[0]:.4f} to {values[-1]:.4f}"
    return Markup(
        f'<svg width="{20 + 15 * len(values)}" height="26" role="img" aria-label="{label}"><polyline points="{points}" '
        f'fill="none" stroke="var(--bar)" stroke-width="2"/></svg><small> {label}</small>'
    )


def _facts(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in environment.items():
        if isinstance(value, Mapping):
            yield name, ", ".join(f"{key} {found}" for key, found in value.items() if found is not None)
        elif value not in (None, ""):
            yield name, str(value)
