"""Trials: each defect, and its benign twin, before the laws that it names."""

import hashlib
import time
from collections.abc import Sequence

import msgspec
import torch

from conformance.defects.catalogue import TWIN, sources_of
from conformance.defects.injection import Defect
from conformance.defects.shown_by import SHOWN_BY
from conformance.describe import PROJECT
from conformance.detection.bench import DEADLINE_S, Bench, Judged, excess
from conformance.engine.verdicts import Verdict

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
    cases = bench.cases(SHOWN_BY[defect.id], only=defect.laws)
    deadline_s = HANG_DEADLINE_S if defect.hangs else DEADLINE_S
    twins = bench.judge(cases, defect=defect.id + TWIN)
    found = bench.judge(cases, defect=defect.id, deadline_s=deadline_s)
    laws = {law: _law_trial(law, defect, found, twins) for law in defect.laws}
    others: tuple[str, ...] = ()
    if any(not trial.kills for trial in laws.values()):
        others = _caught_by_others(bench, defect, deadline_s=deadline_s)
    return Trial(
        defect=defect.id,
        key=key_of(defect, profile=bench.profile),
        seconds=round(time.monotonic() - start_s, 2),
        laws=laws,
        caught_by_others=others,
    )


def _law_trial(law: str, defect: Defect, found: Sequence[Judged], twins: Sequence[Judged]) -> LawTrial:
    mine = [judged for judged in found if judged.case.law == law]
    of_twin = [judged for judged in twins if judged.case.law == law]
    kills = [judged for judged in mine if _is_kill(judged, defect)]
    margins = [margin for judged in kills if (margin := excess(judged.measured)) > 1.0]
    first = next(iter(kills or mine), None)
    return LawTrial(
        cells=len(mine),
        kills=tuple(judged.case.cell.id for judged in kills),
        margin=max(margins, default=None),
        reason=first.reason if first else "the profile has no cell that shows it",
        twin_failures=tuple(
            f"{judged.case.cell.id}: {judged.verdict}: {judged.reason}"
            for judged in of_twin
            if judged.verdict != Verdict.PASS
        ),
        twin_margin=max((excess(judged.measured) for judged in of_twin), default=0.0),
    )


def _is_kill(judged: Judged, defect: Defect) -> bool:
    """A TypeError means that the injection does not fit what it replaces: nothing was detected."""
    expected = Verdict.TIMEOUT if defect.hangs else Verdict.FAIL
    return judged.verdict == expected and _MISFIT not in judged.reason


def _caught_by_others(bench: Bench, defect: Defect, *, deadline_s: float) -> tuple[str, ...]:
    found = bench.judge(bench.cases(SHOWN_BY[defect.id]), defect=defect.id, deadline_s=deadline_s)
    laws = {judged.case.law for judged in found if _is_kill(judged, defect)}
    return tuple(sorted(laws - set(defect.laws)))


def key_of(defect: Defect, *, profile: str) -> str:
    """Of all that a trial depends on: the suite and the trainer without other defects, the matrix, and torch."""
    shared = [
        file
        for package in ("conformance", "reference_trainer")
        for file in sorted((PROJECT / package).rglob("*.py"))
        if not file.stem.endswith("_faults") and file.stem != "shown_by"
    ]
    digest = hashlib.sha256()
    for file in (*shared, *sources_of(defect), PROJECT / "matrix.yaml"):
        digest.update(file.read_bytes())
    digest.update(f"{torch.__version__} {profile} {defect.id} {SHOWN_BY[defect.id]}".encode())
    return digest.hexdigest()[:16]
