"""Localisation of a failed case: its cells are run once more with taps, and compared stage by stage with an oracle."""

import contextlib
import inspect
import time
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from conformance.judge.measurements import Measurement
from conformance.judge.registry import AssertedLaw, asserted_laws
from conformance.judge.support import Machine
from conformance.localisation.computations import first_wrong_action, first_wrong_recomputation
from conformance.localisation.dtypes import first_wrong_dtype
from conformance.localisation.ended_run import place_of_end
from conformance.localisation.families import Search, where_of
from conformance.localisation.findings import changed_by_delays, own_finding, race
from conformance.localisation.hanging import place_of_hang
from conformance.localisation.memory import first_held
from conformance.localisation.ranks import ranks_of_mesh
from conformance.localisation.reference_run import ReferenceRun
from conformance.localisation.repeated_run import first_difference
from conformance.localisation.schedule import first_wrong_collective
from conformance.localisation.subject_run import SubjectRun
from conformance.outcomes import CellFailed, Failure, Unsupported
from conformance.plan.cells import Cell
from conformance.plan.matrix import Case
from conformance.plan.mesh import Mesh
from conformance.report.location import Location
from conformance.run.case_runs import CaseRuns
from conformance.run.record import Record
from conformance.run.store import RecordStore
from conformance.subjects.running import SubjectRuns


def explained(
    case: Case, store: RecordStore, *, machine: Machine, measured: Mapping[str, Measurement], reason: str = ""
) -> Location | None:
    """Return the first wrong place of the cells on which a case rests, by the searches of its law, see `families`.

    None if all places are right. `measured` are the metrics of the failed case, `reason` is its reason. Raises
    CellFailed if a run does not finish.
    """
    start_s = time.monotonic()
    asserted = asserted_laws()[case.law]
    if case.trainer is None:
        runs = CaseRuns(store, asserted.law.substrates)
        location = next(_found(asserted, runs, case.cell, machine, measured, reason), None)
    else:
        location = _found_for_trainer(case, store, measured, reason)
    if location is None:
        return None
    cell = location.cell or case.cell.id
    return replace(location, case=case.id, cell=cell, seconds=round(time.monotonic() - start_s, 3))


def _found(
    asserted: AssertedLaw,
    runs: CaseRuns,
    cell: Cell,
    machine: Machine,
    measured: Mapping[str, Measurement],
    reason: str,
) -> Iterator[Location]:
    """Yield the places that the searches of a law find, in their order.

    A world that is larger than this machine's is not run, but only simulated as the law did.
    """
    hang = _hang(runs.kept_failure(cell), cell)
    if hang is not None:
        yield hang
        return
    is_too_large = cell.world_size > machine.max_world_size
    for search in where_of(asserted.law.id).searches:
        if is_too_large and search in ("tensors", "order", "dtypes"):
            continue
        with contextlib.suppress(Unsupported):
            yield from filter(None, _searched(search, asserted, runs, cell, measured, reason))


def _hang(failure: Failure | None, cell: Cell) -> Location | None:
    """Return the place of a run that hung, which the store keeps: a run with taps would hang as well."""
    if failure is None or failure.kind != "timeout":
        return None
    return place_of_hang(failure, ranks_of_mesh(Mesh.parse(cell.mesh)))


def _searched(
    search: Search,
    asserted: AssertedLaw,
    runs: CaseRuns,
    cell: Cell,
    measured: Mapping[str, Measurement],
    reason: str,
) -> Iterator[Location | None]:
    match search:
        case "tensors":
            yield from _first_wrong(asserted, runs, cell)
        case "order":
            yield from _out_of_order(runs, cell, measured)
        case "memory":
            yield first_held(asserted.law.id, cell, runs)
        case "dtypes":
            run = ReferenceRun(runs, cell)
            yield first_wrong_dtype(cell, run.record, run.ranks)
        case "race":
            yield race(cell, runs)
        case "delays":
            yield changed_by_delays(cell, runs)
        case "finding":
            yield own_finding(cell, measured, reason)


def _out_of_order(runs: CaseRuns, cell: Cell, measured: Mapping[str, Measurement]) -> Iterator[Location | None]:
    """Yield the first action, collective and recomputed forward pass that is out of place, of a run of FSDP2."""
    if cell.implementation != "fsdp2":
        return
    run = ReferenceRun(runs, cell)
    try:
        _ = run.record
    except CellFailed:
        return  # the search for tensors tells where a run ended
    yield first_wrong_action(cell, run.record, run.ranks)
    yield first_wrong_collective(cell, run.record, run.ranks, run.traces)
    yield first_wrong_recomputation(cell, run.traces, run.ranks, measured)


def _found_for_trainer(
    case: Case, store: RecordStore, measured: Mapping[str, Measurement], reason: str
) -> Location | None:
    """Return the first wrong place of a run of another trainer, or else the law's own finding."""
    runs = SubjectRuns(store)
    failure = runs.kept_failure(case.cell)
    if failure is not None:  # ranks of other trainers leave no taps when they raise
        return _hang(failure, case.cell)
    location = SubjectRun(runs, case.cell).first_wrong()
    return location or own_finding(case.cell, measured, reason)


def _first_wrong(asserted: AssertedLaw, runs: CaseRuns, cell: Cell) -> Iterator[Location]:
    """Yield the first wrong place of each cell that a law compares, its own first, then that of two equal runs."""
    asked = _asked(asserted, runs, cell)
    tapped = {each: ReferenceRun(runs, each) for each, _ in [(cell, 0), *asked]}
    for each, run in tapped.items():
        location = _first_wrong_of(run, runs, each)
        if location is not None:
            yield replace(location, cell=each.id)
    if any(repeat for _, repeat in asked):
        again = ReferenceRun(runs, cell, repeat=1)
        location = first_difference(tapped[cell], again)
        if location is not None:
            yield replace(location, cell=cell.id)


def _first_wrong_of(run: ReferenceRun, runs: CaseRuns, cell: Cell) -> Location | None:
    """Return the first wrong place of a run, or if it raises, the place at which it ended.

    Raises CellFailed if the ranks of a failed run have left no taps.
    """
    try:
        return run.first_wrong()
    except CellFailed as failed:
        location = place_of_end(runs.tapped_directory(cell), Mesh.parse(cell.mesh), failed.failure)
        if location is None:
            raise
        return location


def _asked(asserted: AssertedLaw, runs: CaseRuns, cell: Cell) -> list[tuple[Cell, int]]:
    """Return the cells whose runs a law asks for, with the number of the repetition, from its test on kept records."""
    asked: list[tuple[Cell, int]] = []

    def run(wanted: Cell, *, repeat: int = 0, tapped: bool = False) -> Record:
        asked.append((wanted, repeat))
        return runs.run(wanted, repeat=repeat, tapped=tapped)

    known: dict[str, Any] = {**runs.fixtures(cell), "run": run}
    with contextlib.suppress(Exception):  # the failure of the case, again
        asserted.test(**{name: known[name] for name in inspect.signature(asserted.test).parameters})
    return asked
