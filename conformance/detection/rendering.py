"""Kill matrix in words: for a terminal, and as markdown for docs/kill_matrix.md."""

from collections.abc import Iterator, Sequence

from tabulate import tabulate

from conformance.defects.catalogue import defects
from conformance.detection.kill_matrix import KillMatrix
from conformance.detection.trials import LawTrial, Trial
from conformance.report.wording import counted

_COMMAND = "python -m conformance defects --write-docs"
_INTRODUCTION = f"""Written by `{_COMMAND}`. Each defect is injected into the rank processes and must be caught by
every law that it names; its benign twin, the same place changed in a correct way, must pass them. The margin is how
far outside of its bounds the worst metric was, where 1 is at a bound: how many times the bound a rounding error was,
and how many times half of the distance between its bounds a number of bytes was away from their middle; *exact* where
only one value is right, *stated* where the law compares facts and no metrics. Defects that the CPU does not show are
judged on the [simulated accelerator](simulated_accelerator.md). The twin's percentage is its margin: 100 % is at a
bound. A law for which the profile has no cell that triggers the defect is judged on the first cell of
the matrix that does."""
_HEADERS = ["defect", "law", "caught on", "margin", "twin"]
_LAW_HEADERS = ["law", "defects", "smallest margin"]


def as_text(matrix: KillMatrix) -> str:
    """Return tables of defects and of laws, and the problems, for a terminal."""
    rows = [row for trial in matrix.trials for row in _rows(trial)]
    sections = [
        tabulate(rows, headers=_HEADERS, disable_numparse=True),
        tabulate(_law_rows(matrix.trials), headers=_LAW_HEADERS, disable_numparse=True),
    ]
    if matrix.unverified:
        sections.append(f"not verified, for want of a device: {'; '.join(matrix.unverified)}")
    return "\n\n".join([*sections, summary(matrix), *matrix.problems])


def as_markdown(matrix: KillMatrix) -> str:
    """Return the content of docs/kill_matrix.md."""
    headers = ["defect", "fault", *_HEADERS[1:]]
    rows = [row for trial in matrix.trials for row in _rows_with_source(trial)]
    unverified = "; ".join(matrix.unverified) or "none"
    return "\n\n".join(
        [
            "# Kill matrix",
            _INTRODUCTION,
            summary(matrix),
            *(f"- **{problem}**" for problem in matrix.problems),
            tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True),
            f"Not tried, for want of a device: {unverified}.",
        ]
    )


def summary(matrix: KillMatrix) -> str:
    """Return one line: how many defects are caught, how many twins pass, and how many laws kill no defect."""
    trials = matrix.trials
    caught = sum(not trial.escapes for trial in trials)
    quiet = sum(not trial.false_alarms for trial in trials)
    laws = {law for trial in trials for law in trial.laws}
    return (
        f"torch {matrix.torch}, profile {matrix.profile}: {caught} of {counted(len(trials), 'defect')} caught by all "
        f"laws that they name, {quiet} of {counted(len(trials), 'twin')} pass, {counted(len(laws), 'law')}, "
        f"{counted(len(matrix.laws_without_kills), 'law')} killing no defect; {counted(matrix.reused, 'trial')} reused"
    )


def _rows(trial: Trial) -> Iterator[list[str]]:
    """A row for each law; the defect is named in the first."""
    for index, (law, law_trial) in enumerate(trial.laws.items()):
        caught_on = f"{len(law_trial.kills)} of {law_trial.cells}" if law_trial.kills else "ESCAPES"
        twin = "FAILS" if law_trial.twin_failures else _percentage(law_trial.twin_margin)
        yield [trial.defect if index == 0 else "", law, caught_on, _margin(law_trial), twin]


def _rows_with_source(trial: Trial) -> Iterator[list[str]]:
    """Rows of `_rows`, with a link to the source of the defect, and its `why`."""
    defect = next(defect for defect in defects() if defect.id == trial.defect)
    for name, *rest in _rows(trial):
        yield [f"[{name}]({defect.source})" if name else "", defect.why if name else "", *rest]


def _law_rows(trials: Sequence[Trial]) -> list[list[str]]:
    by_law: dict[str, list[LawTrial]] = {}
    for trial in trials:
        for law, law_trial in trial.laws.items():
            by_law.setdefault(law, []).append(law_trial)
    return [
        [law, str(sum(bool(law_trial.kills) for law_trial in law_trials)), _smallest_margin(law_trials)]
        for law, law_trials in by_law.items()
    ]


def _smallest_margin(trials: Sequence[LawTrial]) -> str:
    margins = [trial.margin for trial in trials if isinstance(trial.margin, float)]
    return f"{min(margins):.3g}" if margins else "exact or stated"


def _margin(trial: LawTrial) -> str:
    if not trial.kills:
        return ""
    if trial.margin is None:
        return "stated"
    return trial.margin if trial.margin == "exact" else f"{trial.margin:.3g}"


def _percentage(margin: float) -> str:
    return f"{margin:.0%}"
