"""Judge of subjects: the laws on what a subject leaves on its cells, and whether they see with its eyes."""

import importlib.metadata
import time
from collections.abc import Iterator, Sequence

from conformance.judge.measurements import collecting
from conformance.judge.verdicts import Verdict, classify
from conformance.outcomes import CellFailed
from conformance.subjects.catalogue import LAWS
from conformance.subjects.cells import CELLS, FIRST_OF_MESHES, SubjectCell
from conformance.subjects.declaring import SubjectLaw
from conformance.subjects.evidence import Evidence
from conformance.subjects.facts import Description
from conformance.subjects.faults import FAULTS
from conformance.subjects.running import SubjectRuns
from conformance.subjects.schema import FaultSeen, SubjectPolicy, SubjectReport, SubjectVerdict
from conformance.subjects.traffic import reductions


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
        hung = next((entry.cell for entry in verdicts if entry.verdict == Verdict.TIMEOUT), None)
        evidence, of_cell = _verdicts(runs, cell, description, hung=hung)
        verdicts += of_cell
        policies += [_policy(evidence, cell.name_for(description.name))] if evidence else []
    return SubjectReport(
        subject=description.name,
        torch=importlib.metadata.version("torch"),
        versions=description.versions,
        shims=description.shims,
        verdicts=verdicts,
        policies=policies,
        faults=list(_faults(runs, verdicts)) if with_faults else [],
        duration_s=round(time.monotonic() - start_s, 1),
    )


def _verdicts(
    runs: SubjectRuns, cell: SubjectCell, description: Description, *, hung: str | None
) -> tuple[Evidence | None, list[SubjectVerdict]]:
    """Run a cell and judge it; returns no evidence for a cell that was not run to its end.

    After a cell that hung nothing is run: each of the others would probably take all of its time, too.
    """
    name = cell.name_for(description.name)
    if cell.id in description.unsupported:
        return None, _without_run(cell, name, Verdict.UNSUPPORTED, description.unsupported[cell.id])
    if hung is not None:
        return None, _without_run(cell, name, Verdict.NOT_RUN, f"cell {hung} hung")
    if cell.uneven and not runs.reference(cell.workload).facts.varies:
        return None, _without_run(cell, name, Verdict.UNSUPPORTED, "count() is the same for all batches")
    try:
        evidence = runs.run(cell)
    except CellFailed as failed:
        return None, _without_run(cell, name, *classify(failed))
    return evidence, _judged(evidence, name)


def _judged(evidence: Evidence, name: str) -> list[SubjectVerdict]:
    return [_judge(law, evidence, name) for law in LAWS if law.where(evidence.cell)]


def _judge(law: SubjectLaw, evidence: Evidence, name: str) -> SubjectVerdict:
    verdict, reason = Verdict.PASS, ""
    with collecting() as measured:
        try:
            law.test(evidence)
        except Exception as error:
            verdict, reason = classify(error)
    return _verdict(law, name, verdict, reason, measured=measured)


def _without_run(cell: SubjectCell, name: str, verdict: Verdict, reason: str) -> list[SubjectVerdict]:
    return [_verdict(law, name, verdict, reason) for law in LAWS if law.where(cell)]


def _verdict(law: SubjectLaw, cell: str, verdict: Verdict, reason: str, **fields: object) -> SubjectVerdict:
    return SubjectVerdict(
        law=law.id,
        suite_law=law.suite_law,
        cell=cell,
        verdict=verdict,
        reason=reason,
        **fields,  # type: ignore[arg-type]
    )


def _policy(evidence: Evidence, name: str) -> SubjectPolicy:
    facts = evidence.record.ranks[0]
    return SubjectPolicy(
        cell=name,
        matmul_dtypes=facts.matmul_dtypes,
        gradient_dtypes=facts.gradient_dtypes,
        reductions=reductions(facts),
        reference_dtype=evidence.reference.facts.dtype,
    )


def _faults(runs: SubjectRuns, verdicts: Sequence[SubjectVerdict]) -> Iterator[FaultSeen]:
    """Yield the laws that see each fault, of those that hold, on the first cell of each mesh on which any holds.

    A run that ends says nothing of what laws see; after one that hung no fault is tried.
    """
    for cell in FIRST_OF_MESHES:
        name = cell.name_for(runs.description.name)
        holding = {entry.law for entry in verdicts if entry.cell == name and entry.verdict == Verdict.PASS}
        for fault in FAULTS if holding else ():
            try:
                judged = _judged(runs.run(cell, fault=fault), name)
            except CellFailed as failed:
                yield FaultSeen(fault=fault, cell=name, laws=[])
                if classify(failed)[0] == Verdict.TIMEOUT:
                    return
                continue
            failing = [entry.law for entry in judged if entry.verdict == Verdict.FAIL and entry.law in holding]
            yield FaultSeen(fault=fault, cell=name, laws=failing)
