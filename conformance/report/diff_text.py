"""A difference as texts: for the terminal, as markdown, and as a page."""

import html
from collections.abc import Sequence

from tabulate import tabulate

from conformance.report.diff import HARMLESS, Change, Difference

_SHOWN = 30
"""Groups of moved figures, and other changes, that the terminal shows; JSON has all."""
_STYLE = """
:root { color-scheme: light dark; --good: #1a7f37; --bad: #cf222e; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; } th, td { border: 1px solid var(--line); padding: .3rem .5rem; }
th { text-align: left; } td { vertical-align: top; overflow-wrap: anywhere; } .scroll { overflow-x: auto; }
.good { color: var(--good); } .bad { color: var(--bad); }
"""


def as_text(found: Difference) -> str:
    """Both sides, verdicts, and moved figures by law and name."""
    parts = [_sides(found, "simple")]
    verdicts = [change for change in found.changes if change.kind != "metric-moved"]
    if verdicts:
        parts.append(_limited([[c.kind, c.case, c.before, c.after, c.reason] for c in verdicts], _VERDICT_HEADERS))
    if groups := _groups(found):
        parts.append(_limited(groups, _MOVED_HEADERS))
    return "\n\n".join([*parts, summary(found)])


def as_markdown(found: Difference) -> str:
    """For a step summary, or a comment."""
    verdicts = [[c.kind, f"`{c.case}`", c.before, c.after, c.reason] for c in _of_verdicts(found)]
    parts = ["# Conformance, compared with the baseline", summary(found), _sides(found, "github")]
    if verdicts:
        parts += ["## Verdicts", tabulate(verdicts, headers=_VERDICT_HEADERS, tablefmt="github")]
    if groups := _groups(found):
        parts += ["## Figures", tabulate(groups, headers=_MOVED_HEADERS, tablefmt="github", disable_numparse=True)]
    return "\n\n".join(parts) + "\n"


def as_page(found: Difference) -> str:
    """One HTML file that needs nothing else."""
    verdicts = [[c.kind, c.case, c.before, c.after, c.reason] for c in _of_verdicts(found)]
    sections = [_table(_side_rows(found), ["", "before", "after"])]
    if verdicts:
        sections += ["<h2>Verdicts</h2>", _table(verdicts, _VERDICT_HEADERS)]
    if groups := _groups(found):
        sections += ["<h2>Figures</h2>", _table(groups, _MOVED_HEADERS)]
    kind = "bad" if found.exit_status else "good"
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'><title>Conformance: difference</title>"
        f"<style>{_STYLE}</style><h1>Compared with the baseline</h1><p class='{kind}'>{html.escape(summary(found))}</p>"
        f"{''.join(sections)}</html>\n"
    )


def summary(found: Difference) -> str:
    """One line."""
    if not found.changes:
        return "no difference"
    return ", ".join(f"{number} {kind}" for kind, number in sorted(found.counts.items()))


_VERDICT_HEADERS = ["change", "case", "before", "after", "reason"]
_MOVED_HEADERS = ["law", "figure", "cases", "after / before", "for example", "before", "after"]


def _of_verdicts(found: Difference) -> list[Change]:
    """The harmless ones last."""
    verdicts = [change for change in found.changes if change.kind != "metric-moved"]
    return sorted(verdicts, key=lambda change: change.kind in HARMLESS)


def _side_rows(found: Difference) -> list[list[str]]:
    return [[name, found.before[name], found.after[name]] for name in found.before]


def _sides(found: Difference, table_format: str) -> str:
    return tabulate(_side_rows(found), headers=["", "before", "after"], tablefmt=table_format, disable_numparse=True)


def _groups(found: Difference) -> list[list[str]]:
    """Figures that moved, those of one name together, the largest groups first."""
    by_name: dict[tuple[str, str], list[Change]] = {}
    for change in found.changes:
        if change.kind == "metric-moved":
            law = change.case.partition("/")[0] if "/" in change.case else ""
            by_name.setdefault((law, change.reason), []).append(change)
    rows = []
    for (law, name), changes in sorted(by_name.items(), key=lambda item: -len(item[1])):
        first = changes[0]
        cell = first.case.partition("/")[2] or first.case
        rows.append([law, name, str(len(changes)), _range(changes), cell, first.before, first.after])
    return rows


def _range(changes: Sequence[Change]) -> str:
    ratios = sorted(change.ratio for change in changes if change.ratio is not None)
    if not ratios:
        return ""
    low, high = f"{ratios[0]:.3g}", f"{ratios[-1]:.3g}"
    return low if low == high else f"{low} to {high}"


def _limited(rows: list[list[str]], headers: list[str]) -> str:
    table = tabulate(
        rows[:_SHOWN], headers=headers, disable_numparse=True, maxcolwidths=[None, *[60] * (len(headers) - 1)]
    )
    return table if len(rows) <= _SHOWN else f"{table}\n... and {len(rows) - _SHOWN} more: see --json"


def _table(rows: list[list[str]], headers: list[str]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in headers)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table><tr>{head}</tr>{body}</table></div>"
