"""Kill matrix: for each defect, the laws that catch it, their margins, and the laws that it escapes; as text."""

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import msgspec
import torch
from tabulate import tabulate
from tqdm import tqdm

from conformance.defects.catalogue import defects, definitions
from conformance.defects.injection import Defect
from conformance.detection.case_judge import CaseJudge, simulated_device, the_matrix
from conformance.detection.trials import LawTrial, Trial, hardware_for, key_of, try_defect
from conformance.judge.registry import asserted_laws
from conformance.numerics.arithmetic import OWN, Arithmetic
from conformance.project import PROJECT
from conformance.report.wording import counted
from conformance.run.devices.hardware import Hardware
from conformance.run.pool import Pools
from conformance.torch_release import release
from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import allowed

RESULTS_FILE = "kill_matrix.json"
_EVERYWHERE = ("gloo", "simulated")
"""Substrates that every machine has."""


class KillMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """All trials of a profile with one torch."""

    schema: int = 1
    profile: str
    torch: str
    arithmetic: Arithmetic = OWN
    trials: list[Trial]
    """Trials in the order of the catalogue."""
    unverified: list[str]
    """Defects and laws that need a device that this machine lacks: no run proves that the law catches the defect."""
    complete: bool
    """True if the whole catalogue was tried."""
    reused: int = 0
    """Number of trials of earlier calls whose inputs have not changed."""

    @property
    def laws_without_kills(self) -> list[str]:
        """Laws of the profile that can be judged here and that kill no defect; none if not all defects were tried."""
        if not self.complete:
            return []
        killing = {law for trial in self.trials for law, law_trial in trial.laws.items() if law_trial.kills}
        judged = dict.fromkeys(case.law for case in the_matrix().cases(self.profile))
        here = {*_EVERYWHERE, *(("sim",) if simulated_device() else ())}
        laws = {law: asserted.law for law, asserted in asserted_laws().items()}
        if self.arithmetic != OWN:
            laws = {name: law for name, law in laws.items() if not law.memory}
        return [law for law in judged if law in laws and here & {*laws[law].substrates} and law not in killing]

    @property
    def problems(self) -> list[str]:
        """One line each; none if every defect is caught, every twin passes and every law kills a defect."""
        without_kills = [f"{law} kills no defect: no defect proves that it can fail" for law in self.laws_without_kills]
        return [*(line for trial in self.trials for line in _problems_of(trial)), *without_kills]


def _problems_of(trial: Trial) -> Iterator[str]:
    for law in trial.escapes:
        others = f"; caught by {', '.join(trial.caught_by_others)} instead" if trial.caught_by_others else ""
        yield f"{trial.defect} escapes {law}: {trial.laws[law].reason or 'it passes'}{others}"
    for law in trial.false_alarms:
        yield f"{trial.defect}.twin fails {law}: {'; '.join(trial.laws[law].twin_failures)}"


def kill_matrix(
    *, profile: str, directory: Path, workers: int, only: Sequence[str] = (), arithmetic: Arithmetic = OWN
) -> KillMatrix:
    """Try every defect that this machine can show, or those that are named; the results stay in the directory.

    Ranks and oracles compute with an arithmetic.

    Raises UsageError for an unknown profile or defect, OSError for a directory that cannot be made.
    """
    the_matrix().profile(profile)
    here = release(str(torch.__version__))
    chosen = [defect for defect in _chosen(only) if release(defect.since) <= here]
    directory.mkdir(parents=True, exist_ok=True)
    unverified = {
        defect.id: [law for law in defect.laws if hardware_for(defect, law, arithmetic) is None] for defect in chosen
    }
    shown = [defect for defect in chosen if len(unverified[defect.id]) < len(defect.laws)]
    earlier = {trial.key: trial for trial in _earlier(directory)}
    keys = {defect.id: key_of(defect, profile=profile, arithmetic=arithmetic) for defect in shown}
    missing = [defect for defect in shown if keys[defect.id] not in earlier]
    print(f"{len(missing)} defects to try, {len(shown) - len(missing)} known from {directory}", file=sys.stderr)
    empty = KillMatrix(
        profile=profile,
        torch=str(torch.__version__),
        arithmetic=arithmetic,
        trials=[],
        complete=not only,
        unverified=[f"{defect} before {', '.join(laws)}" for defect, laws in unverified.items() if laws],
        reused=len(shown) - len(missing),
    )
    for trial in _try_all(missing, profile=profile, workers=workers, arithmetic=arithmetic):
        earlier[keys[trial.defect]] = trial
        _keep(msgspec.structs.replace(empty, trials=list(earlier.values())), directory)
    return msgspec.structs.replace(empty, trials=[earlier[keys[defect.id]] for defect in shown])


def _keep(matrix: KillMatrix, directory: Path) -> None:
    """Write all trials so far, of each defect the last one: an interrupted call loses none."""
    last = {trial.defect: trial for trial in matrix.trials}
    content = msgspec.json.encode(msgspec.structs.replace(matrix, trials=list(last.values())))
    (directory / RESULTS_FILE).write_bytes(msgspec.json.format(content, indent=1))


def _chosen(only: Sequence[str]) -> list[Defect]:
    by_id = {defect.id: defect for defect in defects()}
    unknown = [name for name in only if name not in by_id]
    if unknown:
        raise UsageError(f"unknown defects {', '.join(unknown)}{allowed(unknown[0], by_id)}")
    return [by_id[name] for name in only or by_id]


def _earlier(directory: Path) -> list[Trial]:
    """Trials of an earlier call; none of a file that cannot be read."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((directory / RESULTS_FILE).read_bytes(), type=KillMatrix).trials
    return []


def _try_all(missing: Sequence[Defect], *, profile: str, workers: int, arithmetic: Arithmetic) -> Iterator[Trial]:
    if not missing:
        return
    number, spawn = min(workers, len(missing)), get_context("spawn")
    with ProcessPoolExecutor(number, spawn, initializer=_open_judge, initargs=(profile, arithmetic)) as processes:
        futures = [processes.submit(_try, defect.id) for defect in missing]
        for future in tqdm(as_completed(futures), total=len(futures), desc="defects", unit="defect", disable=None):
            yield future.result()


_judge: CaseJudge


def _open_judge(profile: str, arithmetic: Arithmetic) -> None:
    """In each process: it keeps its ranks for all its trials; they end with it."""
    global _judge
    hardware = Hardware(arithmetic=arithmetic)
    os.environ.update(hardware.session_environment())
    _judge = CaseJudge(Path(mkdtemp(prefix="kill-matrix-")), Pools(), profile, hardware)


def _try(defect_id: str) -> Trial:
    return try_defect(_judge, next(defect for defect in defects() if defect.id == defect_id))


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


def changed_since(commit: str) -> list[Defect]:
    """Return the defects whose definitions differ between a commit and the working tree.

    Raises UsageError if git does not know the commit.
    """
    command = ["git", "archive", commit, "conformance/defects"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, check=False)
    if done.returncode:
        reason = done.stderr.decode().strip() or "git failed"
        raise UsageError(f"--changed-since {commit}: {reason}; name a commit of this clone")
    with TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
        before = definitions(Path(folder, "conformance", "defects"))
    now = definitions()
    return [defect for defect in defects() if now[defect.id] != before.get(defect.id)]
