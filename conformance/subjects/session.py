"""Another trainer in a session: whether it can be judged at all, and whether the laws see faults in its steps."""

import dataclasses
from collections.abc import Iterator, Sequence

from conformance.defects.catalogue import defects
from conformance.judge.judge import judge
from conformance.judge.registry import asserted_laws
from conformance.judge.support import Machine
from conformance.judge.verdicts import Verdict
from conformance.outcomes import CellFailed
from conformance.plan.matrix import FAULT_CELLS, TRAINER_CELLS, Case
from conformance.report.schema import CaseResult
from conformance.report.trainer import FaultSeen, RunPolicy, TrainerFacts
from conformance.run.store import RecordStore
from conformance.subjects.evidence import reductions
from conformance.subjects.running import SubjectRuns
from reference_trainer.checks import UsageError


def require_judgeable(store: RecordStore) -> None:
    """Raise UsageError, with one line, for a trainer that cannot be loaded or whose model is no reference."""
    runs = SubjectRuns(store)
    try:
        runs.description()
        runs.reference(TRAINER_CELLS[0])
    except CellFailed as failed:
        raise UsageError(failed.failure.reason) from None


def trainer_facts(
    store: RecordStore, results: Sequence[CaseResult], trainer: str, *, machine: Machine, with_faults: bool
) -> TrainerFacts:
    """Return the facts about the trainer of a store, which a session has judged with these results."""
    runs = SubjectRuns(store)
    description = runs.description()
    return TrainerFacts(
        name=trainer,
        given=store.subject or "",
        versions=description.versions,
        shims=description.shims,
        policies=list(_policies(store, results)),
        faults=list(faults_seen(store, results, trainer, machine=machine)) if with_faults else [],
        notes=runs.reference(TRAINER_CELLS[0]).facts.notes,
    )


def _policies(store: RecordStore, results: Sequence[CaseResult]) -> Iterator[RunPolicy]:
    """Yield the policy of each cell that was run to its end."""
    ended = {result.cell for result in results if result.verdict in (Verdict.PASS, Verdict.FAIL) and result.measured}
    for cell in (cell for cell in TRAINER_CELLS if cell.id in ended):
        evidence = SubjectRuns(store).evidence(cell)
        facts = evidence.record.ranks[0]
        yield RunPolicy(
            cell=cell.id,
            matmul_dtypes=facts.matmul_dtypes,
            gradient_dtypes=facts.gradient_dtypes,
            reductions=reductions(facts),
            reference_dtype=evidence.reference.facts.dtype,
            by_suite=facts.by_suite,
        )


def faults_seen(
    store: RecordStore, results: Sequence[CaseResult], trainer: str, *, machine: Machine
) -> Iterator[FaultSeen]:
    """Yield the laws that see each fault, of those that hold, on the first cell of each mesh on which any holds.

    A run that ends early shows nothing about the laws; after one that hung no fault is tried.
    """
    substrates = {result.substrate for result in results if result.verdict == Verdict.PASS}
    faults = [defect for defect in defects() if defect.of == "any trainer" and substrates & {*defect.substrates}]
    for cell in FAULT_CELLS:
        holding = [result.law for result in results if result.cell == cell.id and result.verdict == Verdict.PASS]
        for fault in faults if holding else ():
            faulty = dataclasses.replace(store, defect=fault.id, shares_ranks=True)
            laws = [asserted for law, asserted in asserted_laws().items() if law in holding]
            judged = [judge(Case(a.law.id, cell, trainer), a.law, a.test, faulty, machine=machine) for a in laws]
            seen = [
                entry.case.law
                for entry in judged
                if entry.verdict == Verdict.FAIL and not isinstance(entry.error, CellFailed)
            ]
            yield FaultSeen(fault=fault.id, cell=cell.id, laws=seen)
            if any(entry.verdict == Verdict.TIMEOUT for entry in judged):
                return
