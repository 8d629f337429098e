"""Kill matrix: for each defect, the laws that catch it, their margins, and the laws that it escapes."""

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from tempfile import mkdtemp

import msgspec
import torch
from tqdm import tqdm

from conformance.defects.catalogue import defects
from conformance.defects.injection import Defect
from conformance.detection.case_judge import CaseJudge, simulated_device, the_matrix
from conformance.detection.trials import Trial, hardware_for, key_of, try_defect
from conformance.judge.registry import asserted_laws
from conformance.numerics.arithmetic import OWN, Arithmetic
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
