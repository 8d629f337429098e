"""Judge of subjects: the laws on what a subject leaves on its cells, and whether they see with its eyes."""

import importlib.metadata
import time
from collections.abc import Sequence

from conformance.judge.measurements import collecting
from conformance.judge.verdicts import Verdict, classify
from conformance.outcomes import CellFailed
from conformance.subjects.cells import CELLS, FIRST, SubjectCell
from conformance.subjects.declaring import SubjectLaw
from conformance.subjects.evidence import Evidence
from conformance.subjects.facts import Description
from conformance.subjects.faults import FAULTS
from conformance.subjects.laws import LAWS
from conformance.subjects.running import SubjectRuns
from conformance.subjects.schema import FaultSeen, SubjectPolicy, SubjectReport, SubjectVerdict


def judge_subject(
    runs: SubjectRuns, *, cells: Sequence[SubjectCell] = CELLS, with_faults: bool = True
) -> SubjectReport:
    """Run a subject on cells and return the verdicts of all laws; `with_faults` also tests whether it is blind.

    Raises SubjectMistake, with one line, for a subject that cannot be judged at all.
    """
    start_s, description = time.monotonic(), runs.description
    verdicts: list[SubjectVerdict] = []
    policies: list[SubjectPolicy] = []
    for cell in cells:
        evidence, of_cell = _verdicts(runs, cell, description)
        verdicts += of_cell
        policies += [_policy(evidence)] if evidence else []
    return SubjectReport(
        subject=description.name,
        torch=importlib.metadata.version("torch"),
        versions=description.versions,
        shims=description.shims,
        verdicts=verdicts,
        policies=policies,
        faults=_faults(runs, verdicts) if with_faults else [],
        duration_s=round(time.monotonic() - start_s, 1),
    )


def _verdicts(
    runs: SubjectRuns, cell: SubjectCell, description: Description
) -> tuple[Evidence | None, list[SubjectVerdict]]:
    """Run a cell and judge it; returns no evidence for a cell that was not run to its end."""
    if cell.id in description.unsupported:
        return None, _without_run(cell, Verdict.UNSUPPORTED, description.unsupported[cell.id])
    if cell.uneven and not runs.reference(cell.layout).facts.varies:
        return None, _without_run(cell, Verdict.UNSUPPORTED, "count() is the same for all batches")
    try:
        evidence = runs.run(cell)
    except CellFailed as failed:
        return None, _without_run(cell, *classify(failed))
    return evidence, _judged(evidence)


def _judged(evidence: Evidence) -> list[SubjectVerdict]:
    return [_judge(law, evidence) for law in LAWS if law.where(evidence.cell)]


def _judge(law: SubjectLaw, evidence: Evidence) -> SubjectVerdict:
    verdict, reason = Verdict.PASS, ""
    with collecting() as measured:
        try:
            law.test(evidence)
        except Exception as error:
            verdict, reason = classify(error)
    return _verdict(law, evidence.cell, verdict, reason, measured=measured)


def _without_run(cell: SubjectCell, verdict: Verdict, reason: str) -> list[SubjectVerdict]:
    return [_verdict(law, cell, verdict, reason) for law in LAWS if law.where(cell)]


def _verdict(law: SubjectLaw, cell: SubjectCell, verdict: Verdict, reason: str, **fields: object) -> SubjectVerdict:
    return SubjectVerdict(
        law=law.id,
        suite_law=law.suite_law,
        cell=cell.id,
        verdict=verdict,
        reason=reason,
        **fields,  # type: ignore[arg-type]
    )


def _policy(evidence: Evidence) -> SubjectPolicy:
    facts = evidence.record.ranks[0]
    return SubjectPolicy(
        cell=evidence.cell.id,
        matmul_dtypes=facts.matmul_dtypes,
        gradient_dtypes=facts.gradient_dtypes,
        reductions=facts.reductions,
        reference_dtype=evidence.reference.facts.dtype,
    )


def _faults(runs: SubjectRuns, verdicts: Sequence[SubjectVerdict]) -> list[FaultSeen]:
    """Return the laws that see each fault, of those that hold on the subject; none if no law holds."""
    holding = {entry.law for entry in verdicts if entry.cell == FIRST.id and entry.verdict == Verdict.PASS}
    if not holding:
        return []
    return [FaultSeen(fault=fault, laws=_seen_by(runs, fault, holding)) for fault in FAULTS]


def _seen_by(runs: SubjectRuns, fault: str, holding: set[str]) -> list[str]:
    try:
        verdicts = _judged(runs.run(FIRST, fault=fault))
    except CellFailed:
        return []  # a run that ends says nothing of what laws see
    return [entry.law for entry in verdicts if entry.verdict == Verdict.FAIL and entry.law in holding]
