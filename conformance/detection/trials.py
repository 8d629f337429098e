"""Trials: each defect, and its benign twin, before the laws that it names."""

import hashlib
import time
from collections.abc import Sequence

import msgspec
import torch

from conformance.defects.catalogue import TWIN, sources_of
from conformance.defects.injection import Defect
from conformance.detection.case_judge import DEADLINE_S, CaseJudge, judge_case
from conformance.judge.judge import Judged
from conformance.judge.margins import margin
from conformance.judge.verdicts import Verdict
from conformance.plan.lock import lock_file
from conformance.project import PROJECT, data_file

HANG_DEADLINE_S = 5.0
_PASSES = (Verdict.PASS, Verdict.WAIVED)
_MISFIT = "TypeError"


class LawTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Defect before one law."""

    cells: int
    """Number of cells on which the law was judged."""
    kills: tuple[str, ...]
    """Cells on which the law failed as it must."""
    margin: float | None
    """Margin of the worst metric, see `margins.margin`; None if no metric of the law is outside of a bound."""
    reason: str
    """Reason of the first kill, or of what came instead."""
    twin_failures: tuple[str, ...]
    """Cells on which the twin did not pass, with verdict and reason."""
    twin_margin: float
    """Margin of the twin: at most 1 if all its metrics are within their bounds."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one defect before all laws that it names."""

    defect: str
    key: str
    """Equal for equal code, torch, profile and defect: then the result is the same."""
    seconds: float
    laws: dict[str, LawTrial]
    caught_by_others: tuple[str, ...] = ()
    """Other laws that failed on the same cells, if a law let the defect escape."""

    @property
    def escapes(self) -> tuple[str, ...]:
        """Laws that must catch the defect, and did not."""
        return tuple(law for law, trial in self.laws.items() if not trial.kills)

    @property
    def false_alarms(self) -> tuple[str, ...]:
        """Laws that the twin did not pass."""
        return tuple(law for law, trial in self.laws.items() if trial.twin_failures)


def try_defect(case_judge: CaseJudge, defect: Defect) -> Trial:
    """Judge the laws that a defect names, on the cells that trigger it, with its twin and then with the defect.

    In this order, since processes that other defects were in may serve both: what passes with the twin is not made to
    fail by traces of these.
    """
    start_s = time.monotonic()
    cases = case_judge.cases_of(defect.cells, defect.laws)
    of_twin = case_judge.judge(cases, defect=defect.id + TWIN)
    of_defect = case_judge.judge(cases, defect=defect.id, deadline_s=_deadline_s(defect))
    laws = {law: _law_trial(law, defect, of_defect, of_twin) for law in defect.laws}
    has_escaped = any(not trial.kills for trial in laws.values())
    return Trial(
        defect=defect.id,
        key=key_of(defect, profile=case_judge.profile),
        seconds=round(time.monotonic() - start_s, 2),
        laws=laws,
        caught_by_others=_caught_by_others(case_judge, defect) if has_escaped else (),
    )


def escapes(case_judge: CaseJudge, defect: Defect) -> list[str]:
    """Return the laws that a defect names and that fail on no cell that triggers it.

    Each is judged until its first kill, without twins.
    """
    left = list(defect.laws)
    store = case_judge.store(defect=defect.id, deadline_s=_deadline_s(defect))
    for case in case_judge.cases_of(defect.cells, defect.laws):
        if case.law in left and _is_kill(judge_case(case, store), defect):
            left.remove(case.law)
    return left


def _deadline_s(defect: Defect) -> float:
    return HANG_DEADLINE_S if defect.hangs else DEADLINE_S


def _law_trial(law: str, defect: Defect, of_defect: Sequence[Judged], of_twin: Sequence[Judged]) -> LawTrial:
    judged = [result for result in of_defect if result.case.law == law]
    twins = [result for result in of_twin if result.case.law == law]
    kills = [result for result in judged if _is_kill(result, defect)]
    margins = [margin(kill.measured) for kill in kills]
    first = next(iter(kills or judged), None)
    return LawTrial(
        cells=len(judged),
        kills=tuple(kill.case.cell.id for kill in kills),
        margin=max((value for value in margins if value > 1.0), default=None),
        reason=first.reason if first else "the profile has no cell that triggers it",
        twin_failures=tuple(
            f"{twin.case.cell.id}: {twin.verdict}: {twin.reason}" for twin in twins if twin.verdict not in _PASSES
        ),
        twin_margin=max((margin(twin.measured) for twin in twins), default=0.0),
    )


def _is_kill(judged: Judged, defect: Defect) -> bool:
    """A TypeError means that the injection does not fit what it replaces: nothing was detected."""
    expected = Verdict.TIMEOUT if defect.hangs else Verdict.FAIL
    return judged.verdict == expected and _MISFIT not in judged.reason


def _caught_by_others(case_judge: CaseJudge, defect: Defect) -> tuple[str, ...]:
    cases = case_judge.cases(defect.cells)
    judged = case_judge.judge(cases, defect=defect.id, deadline_s=_deadline_s(defect))
    laws = {result.case.law for result in judged if _is_kill(result, defect)}
    return tuple(sorted(laws - set(defect.laws)))


def key_of(defect: Defect, *, profile: str) -> str:
    """Return a digest of all that a trial depends on.

    That is the suite and the trainer without other defects, matrix.yaml, matrix.lock and waivers.yaml, torch, profile
    and defect.
    """
    shared = [
        file
        for package in ("conformance", "reference_trainer")
        for file in sorted((PROJECT / package).rglob("*.py"))
        if not file.stem.endswith("_faults")
    ]
    digest = hashlib.sha256()
    matrix = data_file("matrix.yaml")
    for file in (*shared, *sources_of(defect), matrix, lock_file(matrix), data_file("waivers.yaml")):
        digest.update(file.read_bytes())
    digest.update(f"{torch.__version__} {profile} {defect.id} {defect.cells}".encode())
    return digest.hexdigest()[:16]
