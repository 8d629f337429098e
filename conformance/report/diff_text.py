"""Difference between two reports in words: for a terminal, and as markdown."""

from collections.abc import Mapping, Sequence

from tabulate import tabulate

from conformance.report.diff import HARMLESS, RESTRICTIONS, WARNINGS, Change, Difference, Kind

_METRIC: Kind = "metric-moved"
_SHOWN = 30
"""Groups of drifted metrics, and other changes, that the terminal shows; JSON has all."""
SIDE_HEADERS = ["", "before", "after"]
VERDICT_HEADERS = ["change", "case", "before", "after", "reason"]
COVERAGE_HEADERS = ["coverage", "before", "after", "of what"]
METRIC_HEADERS = ["law", "metric", "cases", "after / before", "for example", "before", "after"]


def as_text(difference: Difference) -> str:
    """Return what was compared, changes of verdicts, drifted metrics by law and name, and coverage, for a terminal."""
    sections = [title(difference), _sides(difference, "simple")]
    if verdicts := [_verdict_row(change) for change in difference.changes if _is_of_verdict(change)]:
        sections.append(_limited(verdicts, VERDICT_HEADERS))
    if metrics := metric_rows(difference):
        sections.append(_limited(metrics, METRIC_HEADERS))
    if fallen := coverage_rows(difference):
        sections.append(_limited(fallen, COVERAGE_HEADERS))
    return "\n\n".join([*sections, summary(difference)])


def as_markdown(difference: Difference) -> str:
    """Return the difference as markdown, for the step summary of a CI job or a comment."""
    sections = [f"# Conformance: {title(difference)}", summary(difference), _sides(difference, "github")]
    if verdicts := [[kind, f"`{case}`", *rest] for kind, case, *rest in verdict_rows(difference)]:
        sections += ["## Verdicts", tabulate(verdicts, headers=VERDICT_HEADERS, tablefmt="github")]
    if metrics := metric_rows(difference):
        table = tabulate(metrics, headers=METRIC_HEADERS, tablefmt="github", disable_numparse=True)
        sections += ["## Metrics", table]
    if fallen := coverage_rows(difference):
        sections += ["## Coverage", tabulate(fallen, headers=COVERAGE_HEADERS, tablefmt="github")]
    return "\n\n".join(sections) + "\n"


def title(difference: Difference) -> str:
    """Return one line: the two sides, with the restrictions of each, and that they differ in these if they do."""
    before, after = (_side(side) for side in (difference.before, difference.after))
    alike = difference.before[RESTRICTIONS] == difference.after[RESTRICTIONS]
    caution = "" if alike else ": not restricted alike, so not every change is torch's"
    return f"{after}, compared with {before}{caution}"


def _side(side: Mapping[str, str]) -> str:
    restricted = f" ({side[RESTRICTIONS]})" if side[RESTRICTIONS] else ""
    return f"torch {side['torch']}, profile {side['profile']}{restricted}"


def summary(difference: Difference) -> str:
    """Return one line with the number of changes of each kind."""
    if not difference.changes:
        return "no difference"
    return ", ".join(f"{number} {kind}" for kind, number in sorted(difference.counts.items()))


def side_rows(difference: Difference) -> list[list[str]]:
    """Return a row for each thing that distinguishes the two sessions, such as the version of torch."""
    sides = ([name, difference.before[name], difference.after[name]] for name in difference.before)
    return [[name, before, after] for name, before, after in sides if before or after]


def verdict_rows(difference: Difference) -> list[list[str]]:
    """Return a row for each change of a verdict, the harmless ones last."""
    changes = filter(_is_of_verdict, difference.changes)
    return [_verdict_row(change) for change in sorted(changes, key=lambda change: change.kind in HARMLESS)]


def coverage_rows(difference: Difference) -> list[list[str]]:
    """Return a row for pairs, triples and each law of which less was seen or judged than before."""
    fallen = (change for change in difference.changes if change.kind in WARNINGS)
    return [[change.case, change.before, change.after, change.reason] for change in fallen]


def metric_rows(difference: Difference) -> list[list[str]]:
    """Return a row for each law and name of drifted metrics, the largest groups first."""
    by_name: dict[tuple[str, str], list[Change]] = {}
    for change in difference.changes:
        if change.kind == _METRIC:
            law = change.case.partition("/")[0] if "/" in change.case else ""
            by_name.setdefault((law, change.reason), []).append(change)
    rows = []
    for (law, name), changes in sorted(by_name.items(), key=lambda item: -len(item[1])):
        first = changes[0]
        cell = first.case.partition("/")[2] or first.case
        rows.append([law, name, str(len(changes)), _ratio_range(changes), cell, first.before, first.after])
    return rows


def _is_of_verdict(change: Change) -> bool:
    return change.kind not in (_METRIC, *WARNINGS)


def _verdict_row(change: Change) -> list[str]:
    return [change.kind, change.case, change.before, change.after, change.reason]


def _ratio_range(changes: Sequence[Change]) -> str:
    ratios = sorted(change.ratio for change in changes if change.ratio is not None)
    if not ratios:
        return ""
    low, high = f"{ratios[0]:.3g}", f"{ratios[-1]:.3g}"
    return low if low == high else f"{low} to {high}"


def _sides(difference: Difference, table_format: str) -> str:
    return tabulate(side_rows(difference), headers=SIDE_HEADERS, tablefmt=table_format, disable_numparse=True)


def _limited(rows: list[list[str]], headers: list[str]) -> str:
    table = tabulate(
        rows[:_SHOWN], headers=headers, disable_numparse=True, maxcolwidths=[None, *[60] * (len(headers) - 1)]
    )
    return table if len(rows) <= _SHOWN else f"{table}\n... and {len(rows) - _SHOWN} more: see --json"
