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
from conformance.localisation.reference_run import ReferenceRun
from conformance.localisation.repeated_run import first_difference
from conformance.plan.cells import Cell
from conformance.plan.matrix import Case
from conformance.report.location import Location
from conformance.run.case_runs import CaseRuns
from conformance.run.record import Record
from conformance.run.store import RecordStore


def explained(
    case: Case, store: RecordStore, *, machine: Machine, measured: Mapping[str, Measurement]
) -> Location | None:
    """Return the first wrong place of the cells on which a case rests, from one further run of each with taps.

    None if all places are right. `measured` are the metrics of the failed case. Raises CellFailed if a run does not
    finish.
    """
    start_s = time.monotonic()
    asserted = asserted_laws()[case.law]
    runs = CaseRuns(store, asserted.law.substrates)
    location = next(_first_wrong(asserted, runs, case.cell), None)
    if location is None:
        return None
    return replace(location, case=case.id, seconds=round(time.monotonic() - start_s, 3))


def _first_wrong(asserted: AssertedLaw, runs: CaseRuns, cell: Cell) -> Iterator[Location]:
    """Yield the first wrong place of each cell that a law compares, its own first, then that of two equal runs."""
    asked = _asked(asserted, runs, cell)
    tapped = {each.id: ReferenceRun(runs, each) for each, _ in [(cell, 0), *asked]}
    for each, run in tapped.items():
        location = run.first_wrong()
        if location is not None:
            yield replace(location, cell=each)
    if any(repeat for _, repeat in asked):
        again = ReferenceRun(runs, cell, repeat=1)
        location = first_difference(tapped[cell.id], again)
        if location is not None:
            yield replace(location, cell=cell.id)


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
