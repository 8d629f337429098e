"""Another trainer in a session: whether it can be judged at all, and whether the laws see faults in its steps."""

import dataclasses
from collections.abc import Iterator, Sequence

from conformance.defects.catalogue import defects
from conformance.defects.injection import Defect
from conformance.judge.judge import Judged, judge
from conformance.judge.registry import asserted_laws
from conformance.judge.support import Machine
from conformance.judge.verdicts import Verdict
from conformance.outcomes import CellFailed
from conformance.plan.cells import Cell, cell_from_id
from conformance.plan.matrix import FAULT_CELLS, TRAINER_CELLS, Case
from conformance.report.schema import CaseResult
from conformance.report.trainer import FaultSeen, RunPolicy, TrainerFacts
from conformance.run.store import RecordStore
from conformance.subjects.evidence import reductions
from conformance.subjects.facts import Description
from conformance.subjects.running import FreshProcesses, SubjectRuns
from reference_trainer.checks import UsageError


def require_judgeable(store: RecordStore, *, runs_cases: bool) -> None:
    """Raise UsageError, with one line, for a trainer that cannot be loaded or whose model is no reference.

    `runs_cases` is True for a process that will run the trainer, and not only its workers.
    """
    runs = SubjectRuns(store)
    try:
        runs.description()
        if runs_cases:
            runs.prepare()
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
        fresh_processes=_why_fresh(description, runs.fresh_processes),
    )


def _why_fresh(description: Description, noted: FreshProcesses) -> str:
    if description.needs_fresh_processes:
        return "the trainer declares it"
    return f"{noted.cell} raised in processes that had served another run, and not in fresh ones" if noted.cell else ""


def _policies(store: RecordStore, results: Sequence[CaseResult]) -> Iterator[RunPolicy]:
    """Yield the policy of each cell that was run to its end."""
    ended = {result.cell for result in results if result.verdict in (Verdict.PASS, Verdict.FAIL) and result.measured}
    for cell in (cell for cell in TRAINER_CELLS if cell.id in ended):
        evidence = SubjectRuns(store).evidence(cell)
        facts = evidence.record.ranks[0]
        yield RunPolicy(
            cell=cell.id,
            matmul_dtypes=sorted({*facts.matmul_dtypes, *facts.kept_matmul_dtypes}),
            gradient_dtypes=facts.gradient_dtypes,
            reductions=reductions(facts),
            reference_dtype=evidence.reference.facts.dtype,
            by_suite=facts.by_suite,
        )


def faults_seen(
    store: RecordStore, results: Sequence[CaseResult], trainer: str, *, machine: Machine
) -> Iterator[FaultSeen]:
    """Yield the laws that see each fault, of those that hold, on one cell of each mesh; see `_shown_on`.

    A run that ends early shows nothing about the laws, nor does a fault all of whose laws fail without it; after a run
    that hung no fault is tried, and none all of whose laws are unsupported there, or speak of no cell of the mesh.
    """
    passed = [result for result in results if result.verdict == Verdict.PASS]
    judged_results = [result for result in results if result.verdict in (Verdict.PASS, Verdict.FAIL)]
    substrates = {result.substrate for result in passed}
    told = {result.law for result in judged_results}
    ran = [cell_from_id(cell).facts() for cell in {result.cell for result in passed}]
    told |= {law for law, asserted in asserted_laws().items() if any(map(asserted.law.scope.gap, ran))}
    takes_turns = SubjectRuns(store).description().turns > 1
    faults = [
        defect
        for defect in defects()
        if defect.of == "any trainer"
        and substrates & {*defect.substrates}
        and told & {*defect.laws}
        and (takes_turns or not defect.turns)
    ]
    for mesh in (cell.mesh for cell in FAULT_CELLS):
        for fault in faults:
            cell = _shown_on(fault, mesh, passed) if _is_about(fault, mesh) else None
            if cell is None:
                continue
            holding = [result.law for result in passed if result.cell == cell.id]
            failing = [result.law for result in results if result.cell == cell.id and result.verdict == Verdict.FAIL]
            faulty = dataclasses.replace(store, defect=fault.id, shares_ranks=True)
            holding += _holding_in_gaps(fault, cell, judged_results, store, trainer, machine)
            if not {*fault.laws} & {*holding, *failing}:
                continue
            judged = _judged(holding, cell, faulty, trainer, machine)
            seen = [
                entry.case.law
                for entry in judged
                if entry.verdict == Verdict.FAIL and not isinstance(entry.error, CellFailed)
            ]
            ended = next((entry.error.failure for entry in judged if isinstance(entry.error, CellFailed)), None)
            already = [law for law in fault.laws if law not in holding and law in failing]
            yield FaultSeen(
                fault=fault.id,
                cell=cell.id,
                laws=seen,
                raised=ended.reason if ended and not seen else "",
                failing_already=already if not {*fault.laws} & {*holding} else [],
            )
            if any(entry.verdict == Verdict.TIMEOUT for entry in judged):
                return


def _judged(laws: Sequence[str], cell: Cell, store: RecordStore, trainer: str, machine: Machine) -> list[Judged]:
    chosen = [asserted for law, asserted in asserted_laws().items() if law in laws]
    return [judge(Case(each.law.id, cell, trainer), each.law, each.test, store, machine=machine) for each in chosen]


def _holding_in_gaps(
    fault: Defect, cell: Cell, results: Sequence[CaseResult], store: RecordStore, trainer: str, machine: Machine
) -> list[str]:
    """Return the laws that must see a fault and hold on a cell that they leave out, because another cell shows as much.

    They are judged there only if the session has judged none of the fault's laws on the cell's mesh, as when the runs
    of all cells that they speak of have raised; `results` are those that were judged.
    """
    if any(result.law in fault.laws and cell_from_id(result.cell).mesh == cell.mesh for result in results):
        return []
    left_out = [law for law in fault.laws if asserted_laws()[law].law.scope.gap(cell.facts())]
    return [each.case.law for each in _judged(left_out, cell, store, trainer, machine) if each.verdict == Verdict.PASS]


def _is_about(fault: Defect, mesh: str) -> bool:
    """Return whether some law that must see a fault speaks of a cell of a mesh, as those of tensor parallelism may."""
    scopes = [asserted_laws()[law].law.scope for law in fault.laws]
    return any(scope.where.holds(cell.facts()) for scope in scopes for cell in TRAINER_CELLS if cell.mesh == mesh)


def _shown_on(fault: Defect, mesh: str, passed: Sequence[CaseResult]) -> Cell | None:
    """Return the first cell of a mesh on which a law holds that must see the fault; otherwise one on which any holds.

    None if no law holds on the mesh.
    """
    holding = {(result.cell, result.law) for result in passed}
    cells = [cell for cell in TRAINER_CELLS if cell.mesh == mesh and any(cell.id == on for on, _law in holding)]
    shown = (cell for cell in cells if any((cell.id, law) in holding for law in fault.laws))
    return next(shown, cells[0] if cells else None)
