"""Trials: each defect, and its benign twin, before the laws that it names."""

import dataclasses
import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import torch

from conformance.defects.catalogue import TWIN, definitions
from conformance.defects.injection import Defect
from conformance.detection.case_judge import (
    DEADLINE_S,
    TRAINER_OF_TURNS,
    CaseJudge,
    judge_case,
    simulated_device,
    the_matrix,
)
from conformance.judge.judge import Judged
from conformance.judge.measurements import margin
from conformance.judge.registry import asserted_laws
from conformance.judge.verdicts import Verdict
from conformance.numerics.arithmetic import OWN, Arithmetic
from conformance.outcomes import CellFailed, swept_metric
from conformance.plan.lock import lock_file
from conformance.plan.matrix import Case
from conformance.project import PROJECT, data_file
from conformance.run.devices.hardware import Hardware

HANG_DEADLINE_S = 5.0
_MISFITS = ("AttributeError", "NameError", "TypeError", "UnboundLocalError")
"""Exceptions of an injection that does not fit the code around it."""


class LawTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Defect before one law."""

    cells: int
    """Number of cells on which the law was judged."""
    kills: tuple[str, ...]
    """Cells on which the law failed as it must."""
    margin: float | Literal["exact"] | None
    """Margin of the worst metric, see `margins.margin`; None if no metric of the law is outside of a bound.

    `exact` stands for an infinite one, which JSON cannot hold.
    """
    reason: str
    """Reason of the first kill, or of the first verdict if none is a kill."""
    twin_failures: tuple[str, ...]
    """Cells on which the twin did not pass, with verdict and reason."""
    twin_margin: float
    """Margin of the twin where it passes, at most 1: metrics that a waiver excuses, or of a failure, have none here."""


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

    In this order, since ranks that ran other defects may serve both: a case that passes with the twin is not made to
    fail by traces of these. Laws that cannot catch the defect on this machine are left out.
    """
    start_s = time.monotonic()
    judged: list[Judged] = []
    twins: list[Judged] = []
    for judge, cases in cases_by_judge(case_judge, defect):
        twins += judge.judge(cases, defect=defect.id + TWIN)
        judged += judge.judge(cases, defect=defect.id, deadline_s=_deadline_s(defect))
    arithmetic = case_judge.hardware.arithmetic
    here = [law for law in defect.laws if hardware_for(defect, law, arithmetic) is not None]
    laws = {law: _law_trial(law, defect, judged, twins) for law in here}
    has_escaped = any(not trial.kills for trial in laws.values())
    return Trial(
        defect=defect.id,
        key=key_of(defect, profile=case_judge.profile, arithmetic=arithmetic),
        seconds=round(time.monotonic() - start_s, 2),
        laws=laws,
        caught_by_others=_caught_by_others(case_judge, defect) if has_escaped else (),
    )


def escapes(case_judge: CaseJudge, defect: Defect) -> list[str]:
    """Return the laws that a defect names and that fail on no cell that triggers it.

    Each is judged until its first kill, on the cheapest cells first, without twins.
    """
    left = list(defect.laws)
    for judge, cases in cases_by_judge(case_judge, defect):
        store = judge.store(defect=defect.id, deadline_s=_deadline_s(defect))
        for case in cheapest_first(cases):
            if case.law in left and _is_kill(judge_case(case, store), defect):
                left.remove(case.law)
    return [law for law in left if hardware_for(defect, law) is not None]


def cheapest_first(cases: Sequence[Case]) -> list[Case]:
    """Return cases in the order of the expected durations of their cells."""
    return sorted(cases, key=lambda case: the_matrix().seconds.get(case.cell.id, 0.0))


def hardware_for(defect: Defect, law: str, arithmetic: Arithmetic = OWN) -> Hardware | None:
    """Return hardware with an arithmetic on which the law can catch the defect; None if this machine has none.

    Processors alone come first, then the simulated device.
    """
    asserted = asserted_laws()[law].law
    shown = {*defect.substrates, "simulated"} & {*asserted.substrates}
    if asserted.memory and arithmetic != OWN:
        return None
    if shown & {"gloo", "simulated"}:
        return Hardware(arithmetic=arithmetic)
    return simulated_device(arithmetic) if "sim" in shown else None


def cases_by_judge(case_judge: CaseJudge, defect: Defect) -> Iterator[tuple[CaseJudge, list[Case]]]:
    """Yield the cases of the laws that a defect names, by the hardware on which they can catch it."""
    if defect.turns:
        case_judge = dataclasses.replace(case_judge, trainer=TRAINER_OF_TURNS)
    by_law = {law: hardware_for(defect, law, case_judge.hardware.arithmetic) for law in defect.laws}
    for hardware in dict.fromkeys(by_law.values()):
        if hardware is not None:
            laws = [law for law, its_hardware in by_law.items() if its_hardware == hardware]
            judge = case_judge
            if hardware != case_judge.hardware:
                judge = dataclasses.replace(case_judge, hardware=hardware)
            yield judge, judge.cases_of(defect.cells, laws)


def _deadline_s(defect: Defect) -> float:
    return HANG_DEADLINE_S if defect.hangs else DEADLINE_S


def _law_trial(law: str, defect: Defect, judged: Sequence[Judged], twins: Sequence[Judged]) -> LawTrial:
    judged = [result for result in judged if result.case.law == law]
    twins = [result for result in twins if result.case.law == law]
    kills = [result for result in judged if _is_kill(result, defect)]
    margins = [margin(kill.measured) for kill in kills]
    first = next(iter(kills or judged), None)
    return LawTrial(
        cells=len(judged),
        kills=tuple(kill.case.cell.id for kill in kills),
        margin="exact" if math.inf in margins else max((value for value in margins if value > 1.0), default=None),
        reason=first.reason if first else "the profile has no cell that triggers it",
        twin_failures=tuple(
            f"{twin.case.cell.id}: {twin.verdict}: {twin.reason}" for twin in twins if not passes(twin, defect)
        ),
        twin_margin=max((margin(twin.measured) for twin in twins if twin.verdict == Verdict.PASS), default=0.0),
    )


def passes(twin: Judged, *defects: Defect) -> bool:
    """Return whether a case with the twins of these defects has passed.

    A sweep that tries the subjects of the defects alone does not see the known faults of others.
    """
    is_restricted = swept_metric("right") in twin.measured and any(defect.subjects for defect in defects)
    return twin.verdict in (Verdict.PASS, Verdict.WAIVED) or (is_restricted and twin.verdict == Verdict.UNEXPECTED_PASS)


def _is_kill(judged: Judged, defect: Defect) -> bool:
    """Return whether a law has detected a defect, by a measurement or by the symptom that the defect states.

    Nothing has judged a run in which a rank raises: code that an injection does not fit raises as well.
    """
    if judged.verdict != (Verdict.TIMEOUT if defect.hangs else Verdict.FAIL):
        return False
    if isinstance(judged.error, CellFailed) and judged.error.failure.kind == "raised":
        return bool(defect.raises) and f"raised {defect.raises}: " in judged.reason
    return not any(misfit in judged.reason for misfit in _MISFITS)


def _caught_by_others(case_judge: CaseJudge, defect: Defect) -> tuple[str, ...]:
    cases = case_judge.cases(defect.cells)
    judged = [
        result
        for judge, _ in cases_by_judge(case_judge, defect)
        for result in judge.judge(cases, defect=defect.id, deadline_s=_deadline_s(defect))
    ]
    laws = {result.case.law for result in judged if _is_kill(result, defect)}
    return tuple(sorted(laws - set(defect.laws)))


def key_of(defect: Defect, *, profile: str, arithmetic: Arithmetic = OWN) -> str:
    """Return a digest of everything on which a trial depends.

    These are the suite, with the simulated device, and the trainer, without other defects, matrix.yaml, matrix.lock and
    waivers.yaml, torch, profile, arithmetic and defect.
    """
    shared = [
        file
        for package in ("conformance", "reference_trainer")
        for file in sorted((PROJECT / package).rglob("*"))
        if file.suffix in (".py", ".cpp", ".h") and not file.stem.endswith("_faults")
    ]
    digest = hashlib.sha256()
    matrix = data_file("matrix.yaml")
    for file in (*shared, matrix, lock_file(matrix), data_file("waivers.yaml")):
        digest.update(file.read_bytes())
    digest.update(f"{torch.__version__} {profile} {arithmetic} {defect.id} {definitions()[defect.id]}".encode())
    return digest.hexdigest()[:16]
