"""Another trainer in a session: whether it can be judged at all, and whether the laws see faults in its steps.

Functions import `conformance.subjects`, which takes torch, when they are called: sessions of the reference trainer and
controllers of workers do without it.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from conformance.judge.judge import judge
from conformance.judge.registry import asserted_laws
from conformance.judge.support import Machine
from conformance.judge.verdicts import Verdict
from conformance.outcomes import CellFailed
from conformance.plan.matrix import Case
from conformance.plan.trainer_cells import FAULT_CELLS, TRAINER_CELLS
from conformance.pytest_plugin.setup import SessionSetup
from conformance.report.schema import CaseResult
from conformance.report.trainer import FaultSeen, RunPolicy, TrainerFacts
from conformance.run.store import RecordStore
from reference_trainer.checks import UsageError


def require_judgeable(setup: SessionSetup) -> None:
    """Raise UsageError, with one line, for a trainer that cannot be loaded or whose model is no reference."""
    from conformance.subjects.running import SubjectRuns

    runs = SubjectRuns(setup.store)
    try:
        runs.description()
        runs.reference(TRAINER_CELLS[0])
    except CellFailed as failed:
        raise UsageError(failed.failure.reason) from None


def trainer_facts(setup: SessionSetup, results: Sequence[CaseResult]) -> TrainerFacts:
    """Return the facts about the trainer of a session whose cases have these results."""
    from conformance.subjects.running import SubjectRuns

    description = SubjectRuns(setup.store).description()
    assert setup.trainer is not None
    assert setup.store.subject is not None
    return TrainerFacts(
        name=setup.trainer,
        given=setup.store.subject,
        versions=description.versions,
        shims=description.shims,
        policies=list(_policies(setup, results)),
        faults=list(faults_seen(setup.store, results, setup.trainer, machine=setup.machine)) if setup.faults else [],
    )


def _policies(setup: SessionSetup, results: Sequence[CaseResult]) -> Iterator[RunPolicy]:
    """Yield the policy of each cell that was run to its end."""
    from conformance.subjects.running import SubjectRuns
    from conformance.subjects.traffic import reductions

    ended = {result.cell for result in results if result.verdict in (Verdict.PASS, Verdict.FAIL) and result.measured}
    for cell in (cell for cell in TRAINER_CELLS if cell.id in ended):
        evidence = SubjectRuns(setup.store).evidence(cell)
        facts = evidence.record.ranks[0]
        yield RunPolicy(
            cell=cell.id,
            matmul_dtypes=facts.matmul_dtypes,
            gradient_dtypes=facts.gradient_dtypes,
            reductions=reductions(facts),
            reference_dtype=evidence.reference.facts.dtype,
        )


def faults_seen(
    store: RecordStore, results: Sequence[CaseResult], trainer: str, *, machine: Machine
) -> Iterator[FaultSeen]:
    """Yield the laws that see each fault, of those that hold, on the first cell of each mesh on which any holds.

    A run that ends says nothing about what laws see; after one that hung no fault is tried.
    """
    from conformance.defects.catalogue import defects
    from conformance.subjects.running import runs_for

    for cell in FAULT_CELLS:
        holding = [r.law for r in results if r.cell == cell.id and r.verdict == Verdict.PASS]
        for fault in (defect for defect in defects() if defect.of == "any trainer" and holding):
            faulty = dataclasses.replace(store, defect=fault.id, shares_ranks=True)
            seen = FaultSeen(fault=fault.id, cell=cell.id, laws=[])
            for law in (asserted_laws()[law_id] for law_id in holding):
                case = Case(law.law.id, cell, trainer)
                judged = judge(case, law.law, law.test, runs_for(case, law.law, faulty), machine=machine)
                if judged.verdict == Verdict.FAIL and not isinstance(judged.error, CellFailed):
                    seen.laws.append(law.law.id)
                if isinstance(judged.error, CellFailed):
                    break
            yield seen
            if judged.verdict == Verdict.TIMEOUT:
                return
