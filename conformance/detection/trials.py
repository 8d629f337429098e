"""Trials: each defect, and its benign twin, before the laws that it names."""

import hashlib
import time
from collections.abc import Sequence

import msgspec
import torch

from conformance.defects.catalogue import TWIN, sources_of
from conformance.defects.injection import Defect
from conformance.detection.bench import DEADLINE_S, Bench, Judged, excess, judged
from conformance.judge.verdicts import Verdict
from conformance.project import PROJECT

HANG_DEADLINE_S = 5.0
_MISFIT = "TypeError"


class LawTrial(msgspec.Struct, frozen=True, kw_only=True):
    """A defect before one law."""

    cells: int
    """On how many the law was judged."""
    kills: tuple[str, ...]
    """Those on which it failed as it must."""
    margin: float | None
    """How many times its bound the worst figure was; None if the law does not compare with a bound."""
    reason: str
    """Of the first kill, or of what came instead."""
    twin_failures: tuple[str, ...]
    """Cells on which the twin did not pass, with verdict and reason."""
    twin_margin: float
    """How much of its bound the twin took up."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found about one defect."""

    defect: str
    key: str
    """Equal for equal code, torch, profile and defect: then the result is the same."""
    seconds: float
    laws: dict[str, LawTrial]
    caught_by_others: tuple[str, ...] = ()
    """If a law let it escape: other laws that failed on the same cells."""

    @property
    def escapes(self) -> tuple[str, ...]:
        """Laws that must catch it, and did not."""
        return tuple(law for law, trial in self.laws.items() if not trial.kills)

    @property
    def false_alarms(self) -> tuple[str, ...]:
        """Laws that the twin did not pass."""
        return tuple(law for law, trial in self.laws.items() if trial.twin_failures)


def try_defect(bench: Bench, defect: Defect) -> Trial:
    """Judge the laws that a defect names, on the cells that show it, with its twin and then with the defect.

    In this order, since processes that other defects were in may serve both: what passes with the twin is not made to
    fail by traces of these.
    """
    start_s = time.monotonic()
    cases = bench.cases(defect.cells, only=defect.laws)
    twins = bench.judge(cases, defect=defect.id + TWIN)
    found = bench.judge(cases, defect=defect.id, deadline_s=_deadline_s(defect))
    laws = {law: _law_trial(law, defect, found, twins) for law in defect.laws}
    others: tuple[str, ...] = ()
    if any(not trial.kills for trial in laws.values()):
        others = _caught_by_others(bench, defect)
    return Trial(
        defect=defect.id,
        key=key_of(defect, profile=bench.profile),
        seconds=round(time.monotonic() - start_s, 2),
        laws=laws,
        caught_by_others=others,
    )


def escapes(bench: Bench, defect: Defect) -> list[str]:
    """Laws that it names and that no cell shows it to; each is tried until its first kill, without twins."""
    left = list(defect.laws)
    store = bench.store(defect=defect.id, deadline_s=_deadline_s(defect))
    for case in bench.cases(defect.cells, only=defect.laws):
        if case.law in left and _is_kill(judged(store, case), defect):
            left.remove(case.law)
    return left


def _deadline_s(defect: Defect) -> float:
    return HANG_DEADLINE_S if defect.hangs else DEADLINE_S


def _law_trial(law: str, defect: Defect, found: Sequence[Judged], twins: Sequence[Judged]) -> LawTrial:
    mine = [one for one in found if one.case.law == law]
    of_twin = [one for one in twins if one.case.law == law]
    kills = [one for one in mine if _is_kill(one, defect)]
    margins = [margin for one in kills if (margin := excess(one.measured)) > 1.0]
    first = next(iter(kills or mine), None)
    return LawTrial(
        cells=len(mine),
        kills=tuple(one.case.cell.id for one in kills),
        margin=max(margins, default=None),
        reason=first.reason if first else "the profile has no cell that shows it",
        twin_failures=tuple(
            f"{one.case.cell.id}: {one.verdict}: {one.reason}" for one in of_twin if one.verdict != Verdict.PASS
        ),
        twin_margin=max((excess(one.measured) for one in of_twin), default=0.0),
    )


def _is_kill(one: Judged, defect: Defect) -> bool:
    """A TypeError means that the injection does not fit what it replaces: nothing was detected."""
    expected = Verdict.TIMEOUT if defect.hangs else Verdict.FAIL
    return one.verdict == expected and _MISFIT not in one.reason


def _caught_by_others(bench: Bench, defect: Defect) -> tuple[str, ...]:
    found = bench.judge(bench.cases(defect.cells), defect=defect.id, deadline_s=_deadline_s(defect))
    laws = {one.case.law for one in found if _is_kill(one, defect)}
    return tuple(sorted(laws - set(defect.laws)))


def key_of(defect: Defect, *, profile: str) -> str:
    """Of all that a trial depends on: the suite and the trainer without other defects, the matrix, and torch."""
    shared = [
        file
        for package in ("conformance", "reference_trainer")
        for file in sorted((PROJECT / package).rglob("*.py"))
        if not file.stem.endswith("_faults")
    ]
    digest = hashlib.sha256()
    for file in (*shared, *sources_of(defect), PROJECT / "matrix.yaml"):
        digest.update(file.read_bytes())
    digest.update(f"{torch.__version__} {profile} {defect.id} {defect.cells}".encode())
    return digest.hexdigest()[:16]
