"""The kill matrix as texts: for the terminal, for docs/detection/kill_matrix.md, and as a page."""

import html
import math
from collections.abc import Sequence

from tabulate import tabulate

from conformance.defects.catalogue import defects
from conformance.detection.kill_matrix import KillMatrix
from conformance.detection.trials import LawTrial, Trial

_COMMAND = "python -m conformance defects --write-docs"
_INTRODUCTION = f"""Written by `{_COMMAND}`. Each defect is injected into the rank processes and must be caught by
every law that it names; its benign twin, the same place changed in a correct way, must pass them. The margin is how
many times its bound the worst figure was: *exact* where only one value is right, *stated* where the law compares facts
and no figures. The twin's figure is how much of its bound it took up."""
_STYLE = """
:root { color-scheme: light dark; --pass: #1a7f37; --fail: #cf222e; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; } th, td { border: 1px solid var(--line); padding: .3rem .5rem; }
th { text-align: left; position: sticky; top: 0; background: Canvas; } td { vertical-align: top; }
.killed { color: var(--pass); } .escaped { color: var(--fail); font-weight: bold; } .scroll { overflow-x: auto; }
"""


def as_text(found: KillMatrix) -> str:
    """Tables of defects and of laws, and what is wrong."""
    parts = [
        tabulate(_rows(found.trials), headers=_HEADERS, disable_numparse=True),
        tabulate(_law_rows(found), headers=["law", "defects", "smallest margin"], disable_numparse=True),
        *([f"not verified, for want of a device: {', '.join(found.unverified)}"] if found.unverified else []),
        summary(found),
    ]
    return "\n\n".join([*parts, *found.problems])


def as_markdown(found: KillMatrix) -> str:
    """docs/detection/kill_matrix.md."""
    titles = {defect.id: defect for defect in defects()}
    rows = [
        [f"[{defect}]({titles[defect].source})" if defect else "", titles[defect].title if defect else "", *rest]
        for defect, *rest in _rows(found.trials)
    ]
    return "\n\n".join(
        [
            "# Kill matrix",
            _INTRODUCTION,
            summary(found),
            *(f"- **{problem}**" for problem in found.problems),
            tabulate(rows, headers=["defect", "what it is", *_HEADERS[1:]], tablefmt="github", disable_numparse=True),
            "## Laws",
            tabulate(_law_rows(found), headers=["law", "defects", "smallest margin"], tablefmt="github"),
            "## Not verified",
            "Defects that need a device which the machine of this run lacks: "
            + (", ".join(found.unverified) or "none"),
        ]
    )


def as_page(found: KillMatrix) -> str:
    """One static page."""
    rows = "".join(_page_row(trial, law, of_law) for trial in found.trials for law, of_law in trial.laws.items())
    problems = "".join(f"<li class=escaped>{html.escape(problem)}</li>" for problem in found.problems)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Kill matrix</title><style>{_STYLE}</style><h1>Kill matrix</h1><p>{html.escape(summary(found))}</p>"
        f"<ul>{problems}</ul><div class=scroll><table><tr><th>defect<th>law<th>caught on<th>margin<th>twin<th>reason"
        f"</tr>{rows}</table></div></html>"
    )


def _page_row(trial: Trial, law: str, of_law: LawTrial) -> str:
    caught = f"{len(of_law.kills)} of {of_law.cells} cells"
    twin = "; ".join(of_law.twin_failures) or f"passes, {_share(of_law.twin_margin)}"
    cells = [trial.defect, law, caught, _margin(of_law), twin, of_law.reason]
    kind = "killed" if of_law.kills and not of_law.twin_failures else "escaped"
    return f"<tr class={kind}>" + "".join(f"<td>{html.escape(cell)}" for cell in cells) + "</tr>"


def summary(found: KillMatrix) -> str:
    """One line of figures."""
    caught = sum(not trial.escapes for trial in found.trials)
    quiet = sum(not trial.false_alarms for trial in found.trials)
    laws = {law for trial in found.trials for law in trial.laws}
    return (
        f"torch {found.torch}, profile {found.profile}: {caught} of {len(found.trials)} defects caught by all laws "
        f"that they name, {quiet} of {len(found.trials)} twins pass, {len(laws)} laws, "
        f"{len(found.idle_laws)} laws that catch nothing; {found.reused} trials reused"
    )


_HEADERS = ["defect", "law", "caught on", "margin", "twin"]


def _rows(trials: Sequence[Trial]) -> list[list[str]]:
    """A row for each law; the defect is named in its first."""
    return [
        [
            trial.defect if not index else "",
            law,
            f"{len(of_law.kills)} of {of_law.cells}" if of_law.kills else "ESCAPES",
            _margin(of_law),
            "FAILS" if of_law.twin_failures else _share(of_law.twin_margin),
        ]
        for trial in trials
        for index, (law, of_law) in enumerate(trial.laws.items())
    ]


def _law_rows(found: KillMatrix) -> list[list[str]]:
    rows = []
    for law in dict.fromkeys(law for trial in found.trials for law in trial.laws):
        trials = [trial.laws[law] for trial in found.trials if law in trial.laws]
        margins = [of_law.margin for of_law in trials if of_law.margin is not None and math.isfinite(of_law.margin)]
        smallest = f"{min(margins):.3g}" if margins else "exact or stated"
        rows.append([law, str(sum(bool(of_law.kills) for of_law in trials)), smallest])
    return rows


def _margin(of_law: LawTrial) -> str:
    if not of_law.kills:
        return ""
    if of_law.margin is None:
        return "stated"
    return f"{of_law.margin:.3g}" if math.isfinite(of_law.margin) else "exact"


def _share(margin: float) -> str:
    return f"{margin:.0%}" if math.isfinite(margin) else "exact"
