"""Files of the site: `index.html` with its data, style and script beside it, which a browser opens without a server."""

import re
from collections.abc import Mapping, Sequence
from functools import cache

import msgspec
from jinja2 import Environment
from markupsafe import Markup, escape

from conformance.judge.verdicts import BAD, Verdict
from conformance.report.diff import MIRRORED
from conformance.report.html import linked, outcome_class, template_environment
from conformance.report.schema import Report, verdict_counts
from conformance.report.text import headline
from conformance.report.wording import counted
from conformance.site.content import CODES, content_of

_WIDTH, _HEIGHT = 90, 22
_LINE = Markup('<polyline points="{}" fill="none" stroke="var(--bar)" stroke-width="2"{}/>')
_ORDER = (*BAD, Verdict.WAIVED, Verdict.QUALITY_WARNING, Verdict.NOT_RUN, Verdict.PASS, Verdict.UNSUPPORTED)
"""Verdicts, the gravest first: that of a law is the gravest of its cases. Cases that no machine can judge come last."""
_LINK = re.compile(r"\[(?P<text>[^]]*)\]\((?P<address>https://[^)]*)\)")


def site_files(reports: Sequence[Report], *, kill_matrix: str = "") -> dict[str, str]:
    """Return the files of the site by their names.

    `kill_matrix` is the table of defects as Markdown, which `conformance defects` writes; empty for none.
    Raises UsageError as `content_of` does.
    """
    content = content_of(reports)
    data = {
        "columns": [f"{column.torch}, {column.device}" for column in content.columns],
        "codes": {code: verdict.value for verdict, code in CODES.items()},
        "musts": {law.id: law.must for law in content.laws},
        **msgspec.to_builtins(content.data),
        "findings": [[finding.name, finding.cases] for finding in content.findings],
        "mirrored": MIRRORED,
        "pairs": msgspec.to_builtins(content.pairs),
    }
    templates = {name: _environment().get_template(f"{name}.j2") for name in ("index.html", "site.js", "site.css")}
    defects = table_rows(kill_matrix)
    files = {name: template.render(content=content, defects=defects) for name, template in templates.items()}
    return {**files, "data.js": f"const data = {msgspec.json.encode(data).decode()};\n"}


def table_rows(markdown: str) -> list[list[str]]:
    """Return the cells of a table in Markdown, its head first, without the line of dashes; empty for none."""
    lines = [line.strip().strip("|").split("|") for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines if set("".join(line)) != {"-"}]


def with_links(text: str) -> Markup:
    """Return a text of Markdown as HTML in which `[text](https://...)` is a link."""
    html, end = Markup(), 0
    for match in _LINK.finditer(text):
        html += escape(text[end : match.start()])
        html += Markup('<a href="{}" rel="noreferrer">{}</a>').format(match["address"], match["text"])
        end = match.end()
    return html + escape(text[end:])


def gravest(verdicts: Mapping[str, int]) -> str:
    """Return the gravest of some verdicts; empty for none."""
    return next((verdict.value for verdict in _ORDER if verdict.value in verdicts), "")


def brief(verdicts: Mapping[str, int]) -> str:
    """Return the number of cases with the gravest verdict, and of all if that is no pass: `3 fail of 40`, `40 pass`."""
    worst, total = gravest(verdicts), sum(verdicts.values())
    shows_total = worst != Verdict.PASS and verdicts[worst] < total
    return f"{verdicts[worst]} {worst}{f' of {total}' if shows_total else ''}"


def trend(values: Sequence[float | None], devices: Sequence[str]) -> Markup:
    """Return values by column as a line from 0 to their largest for each type of device.

    Lines after the first are dashed. A column without a value is a gap. Empty if no type of device has two values.
    """
    known = [(number, value) for number, value in enumerate(values) if value is not None]
    largest = max((value for _, value in known), default=0.0) or 1.0
    lines, told = Markup(), []
    for device in dict.fromkeys(devices):
        own = [(number, value) for number, value in known if devices[number] == device]
        told.append(" ".join([device, *(f"{value:.3g}" for _, value in own)]))
        if len(own) > 1:
            dash = Markup(' stroke-dasharray="3 2"') if lines else ""
            lines += _LINE.format(_points(own, columns=len(values), largest=largest), dash)
    if not lines:
        return lines
    svg = Markup('<svg width="{}" height="{}" role="img"><title>{}</title>{}</svg>')
    return svg.format(_WIDTH, _HEIGHT, "; ".join(told).strip(), lines)


def _points(values: Sequence[tuple[int, float]], *, columns: int, largest: float) -> str:
    """Return the coordinates of values by column."""
    step, height = (_WIDTH - 6) / (columns - 1), _HEIGHT - 6
    return " ".join(f"{3 + step * n:.1f},{3 + height - height * value / largest:.1f}" for n, value in values)


@cache
def _environment() -> Environment:
    environment = template_environment("conformance.site", "conformance.report")
    filters = (brief, counted, gravest, headline, linked, outcome_class, trend, verdict_counts, with_links)
    environment.filters |= {function.__name__: function for function in filters}
    return environment
