"""Localisation of a failed case: its cell is run once more with taps, and compared stage by stage with an oracle."""

import time
from collections.abc import Mapping

from msgspec.structs import replace

from conformance.judge.measurements import Measurement
from conformance.judge.registry import asserted_laws
from conformance.judge.support import Machine
from conformance.localisation.reference_run import ReferenceRun
from conformance.localisation.subject_run import SubjectRun
from conformance.localisation.tapped_run import TappedRun
from conformance.plan.matrix import Case
from conformance.report.location import Location
from conformance.run.case_runs import CaseRuns
from conformance.run.store import RecordStore
from conformance.subjects.running import SubjectRuns


def explained(
    case: Case, store: RecordStore, *, machine: Machine, measured: Mapping[str, Measurement]
) -> Location | None:
    """Return the first wrong place of a case's cell, from one further run with taps; None if all places are right.

    `measured` are the metrics of the failed case. Raises CellFailed if the run does not finish.
    """
    start_s = time.monotonic()
    location = _run(case, store).first_wrong()
    if location is None:
        return None
    seconds = round(time.monotonic() - start_s, 3)
    return replace(location, case=case.id, cell=case.cell.id, seconds=seconds)


def _run(case: Case, store: RecordStore) -> TappedRun:
    if case.trainer is not None:
        return SubjectRun(SubjectRuns(store), case.cell)
    return ReferenceRun(CaseRuns(store, asserted_laws()[case.law].law.substrates), case.cell)
