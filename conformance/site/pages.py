"""Files of the site: `index.html` with its data, style and script beside it, which a browser opens without a server."""

from collections.abc import Mapping, Sequence
from functools import cache

import msgspec
from jinja2 import Environment
from markupsafe import Markup

from conformance.judge.verdicts import BAD, Verdict
from conformance.report.html import linked, template_environment
from conformance.report.schema import Report, verdict_counts
from conformance.report.text import headline
from conformance.report.wording import counted
from conformance.site.content import CODES, content_of

_WIDTH, _HEIGHT = 90, 22
_ORDER = (*BAD, Verdict.WAIVED, Verdict.QUALITY_WARNING, Verdict.NOT_RUN, Verdict.UNSUPPORTED, Verdict.PASS)
"""Verdicts, the gravest first: that of a law is the gravest of its cases."""


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
        "pairs": msgspec.to_builtins(content.pairs),
    }
    templates = {name: _environment().get_template(f"{name}.j2") for name in ("index.html", "site.js", "site.css")}
    files = {name: template.render(content=content, kill_matrix=kill_matrix) for name, template in templates.items()}
    return {**files, "data.js": f"const data = {msgspec.json.encode(data).decode()};\n"}


def gravest(verdicts: Mapping[str, int]) -> str:
    """Return the gravest of some verdicts; empty for none."""
    return next((verdict.value for verdict in _ORDER if verdict.value in verdicts), "")


def trend(values: Sequence[float | None]) -> Markup:
    """Return values by column as a line from 0 to their largest; a column without a value is a gap.

    Empty with fewer than two values.
    """
    known = [(number, value) for number, value in enumerate(values) if value is not None]
    if len(known) < 2:
        return Markup()
    largest = max(value for _, value in known) or 1.0
    step = (_WIDTH - 6) / (len(values) - 1)
    points = " ".join(f"{3 + step * n:.1f},{_HEIGHT - 3 - (_HEIGHT - 6) * value / largest:.1f}" for n, value in known)
    return Markup(
        '<svg width="{}" height="{}" role="img" aria-label="{}"><polyline points="{}" fill="none" '
        'stroke="var(--bar)" stroke-width="2"/></svg>'
    ).format(_WIDTH, _HEIGHT, " ".join("none" if value is None else f"{value:.3g}" for value in values), points)


@cache
def _environment() -> Environment:
    environment = template_environment("conformance.site", "conformance.report")
    filters = (counted, gravest, headline, linked, trend, verdict_counts)
    environment.filters |= {function.__name__: function for function in filters}
    return environment
