"""HTML of a report: one file, which needs no network and no other file.

The template is `templates/report.html.j2`, with its style and script beside it; `sections` and `charts` prepare its
content.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from conformance.instruments.communication import Communication
from conformance.judge.verdicts import BAD, CONFORMANT, INCOMPLETE, Verdict
from conformance.report.charts import bar, bounds_bar, deviations, loss_curve, share_bar
from conformance.report.coverage import AXIS_HEADERS, LAW_HEADERS, TOTAL_HEADERS, axis_rows, law_rows, total_rows
from conformance.report.explain import MAX_EXPLANATIONS, explain, summary, title
from conformance.report.glance import cause_anchor, findings
from conformance.report.location import Mark
from conformance.report.module_tree import branches
from conformance.report.schema import CaseResult, Report, verdict_counts
from conformance.report.sections import (
    Family,
    axis_map,
    bytes_text,
    families_of,
    filter_tokens,
    has_outside,
    loss_plots,
    memory_plots,
    narrowest_margin,
    traffic_plots,
)
from conformance.report.text import headline, not_run
from conformance.report.trainer import trainer_lines
from conformance.report.wording import bounds_text, counted, derivation_text, is_outside, value_text

_SHORT = {
    Verdict.UNSUPPORTED.value: "n/a",
    Verdict.UNEXPECTED_PASS.value: "xpass",
    Verdict.QUALITY_WARNING.value: "drifted",
}
"""Verdicts as they are written in the narrow columns of the grid."""
_MARKS: dict[Mark, str] = {
    "right": "\N{CHECK MARK}",
    "wrong": "\N{BALLOT X}",
    "follows": "\N{RIGHTWARDS ARROW}",
    "unseen": "-",
}
"""Signs of the states of modules, which do not depend on colours."""
_OUTCOME_CLASSES = {CONFORMANT: Verdict.PASS.value, INCOMPLETE: Verdict.QUALITY_WARNING.value}
"""Classes of style of an outcome; all others are failures."""
_ISSUES = "https://github.com/pytorch/pytorch/issues/"
_LINK = re.compile(r"(?P<address>https?://[^\s<>\"'`|\\^{}]*[^\s<>\"'`|\\^{}.,;:!?)\]])|\bpytorch#(?P<issue>[0-9]+)\b")


def html_report(report: Report, *, baseline: Report | None = None) -> str:
    """Return the HTML report of report.json; losses are overlaid with those of a baseline."""
    reached = [case for case in report.cases if case.verdict != Verdict.NOT_RUN]
    families = families_of(reached)
    explanations = explain(report)
    tokens = filter_tokens(list(dict.fromkeys([*(case.cell for case in report.cases), *report.cells])))
    return _template().render(
        report=report,
        headline=headline(report),
        outcome_class=outcome_class(report.exit_code),
        findings=findings(reached, explanations),
        failures={"title": title(explanations), "summary": summary(explanations), "causes": explanations},
        shown=MAX_EXPLANATIONS,
        families=families,
        grids=[(family, list(_grid(family))) for family in families],
        map=axis_map(report.cases),
        trainer=list(trainer_lines(report.trainer)) if report.trainer else [],
        coverage={
            "totals": (TOTAL_HEADERS, total_rows(report.coverage)),
            "axes": (AXIS_HEADERS, axis_rows(report.coverage)),
            "laws": (LAW_HEADERS, law_rows(report.coverage)),
        },
        tokens=tokens,
        axes=_filter_axes(tokens),
        verdicts=list(verdict_counts(reached)),
        unreached=list(not_run(report)),
        short=_SHORT,
        marks=_MARKS,
        memory=memory_plots(report.cases),
        losses=loss_plots(report.cases, report.cells, baseline.cells if baseline else {}),
        traffic=traffic_plots(report.cases),
        has_baseline=baseline is not None,
        environment=list(_environment_facts(report.environment)),
    )


def outcome_class(exit_code: int) -> str:
    """Return the class of style, that of a verdict, in which an outcome is shown."""
    return _OUTCOME_CLASSES.get(exit_code, Verdict.FAIL.value)


def linked(text: str) -> Markup:
    """Return a text as HTML in which http addresses and `pytorch#123` are links; everything else is escaped.

    An address of an issue of PyTorch is shown as `pytorch#123`.
    """
    html, end = Markup(), 0
    for match in _LINK.finditer(text):
        address = match["address"] or _ISSUES + match["issue"]
        number = address.removeprefix(_ISSUES)
        shown = f"pytorch#{number}" if number.isdigit() else address
        html += escape(text[end : match.start()])
        html += Markup('<a href="{}" rel="noreferrer">{}</a>').format(address, shown)
        end = match.end()
    return html + escape(text[end:])


def template_environment(*packages: str) -> Environment:
    """Return an environment with the templates of some packages, which escapes texts and refuses unknown names."""
    return Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )


@cache
def _template() -> Template:
    environment = template_environment("conformance.report")
    charts = (bar, bounds_bar, deviations, loss_curve, share_bar)
    words = (bounds_text, bytes_text, cause_anchor, counted, derivation_text, linked, value_text)
    filters = (*charts, *words, branches, has_outside, is_outside, narrowest_margin, verdict_counts)
    environment.filters |= {function.__name__: function for function in filters}
    environment.filters |= {"range_text": _range_text, "exposed_text": _exposed_text}
    return environment.get_template("report.html.j2")


def _grid(family: Family) -> Iterator[tuple[str, list[CaseResult | None]]]:
    """Yield the cells of a family's cases with the case of each law; cells on which one failed come first."""
    by_cell: dict[str, dict[str, CaseResult]] = {}
    for law in family.laws:
        for case in law.cases:
            by_cell.setdefault(case.cell, {})[law.id] = case
    has_passed = {cell: all(case.verdict not in BAD for case in by_law.values()) for cell, by_law in by_cell.items()}
    for cell in sorted(by_cell, key=lambda cell: (has_passed[cell], cell)):
        yield cell, [by_cell[cell].get(law.id) for law in family.laws]


def _filter_axes(tokens: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the words of the filter by axis."""
    axes: dict[str, list[str]] = {}
    for token in sorted({token for words in tokens.values() for token in words}):
        axes.setdefault(token.partition("=")[0], []).append(token)
    return axes


def _range_text(losses: Sequence[float | None]) -> str:
    """Return the first and the last loss: `5.1234 to 4.9876`."""
    ends = [losses[0], losses[-1]] if losses else []
    return " to ".join("not finite" if loss is None else f"{loss:.4f}" for loss in ends)


def _exposed_text(communication: Communication | None) -> str:
    """Return the time in which a step only communicates: `10.0 of 50.0 ms, 20%`."""
    if communication is None:
        return ""
    exposed_ms, step_ms = 1e3 * communication.exposed_s, 1e3 * communication.step_s
    return f"{exposed_ms:.1f} of {step_ms:.1f} ms, {communication.exposed_share:.0%}"


def _environment_facts(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in environment.items():
        if isinstance(value, Mapping):
            yield name, ", ".join(f"{key} {entry}" for key, entry in value.items() if entry is not None)
        elif value not in (None, ""):
            yield name, str(value)
