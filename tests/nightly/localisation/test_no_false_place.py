"""Correct runs have no wrong place, on every cell of a pull request's profile."""

import pytest

from conformance.detection.case_judge import the_matrix
from conformance.localisation.reference_run import ReferenceRun
from conformance.plan.cells import Cell
from conformance.run.case_runs import CaseRuns
from conformance.run.store import RecordStore

CELLS = sorted(the_matrix().profile_cells("pr"), key=lambda cell: cell.id)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_a_correct_run_has_no_wrong_place(store: RecordStore, cell: Cell) -> None:
    location = ReferenceRun(CaseRuns(store), cell).first_wrong()
    assert location is None, location.sentence
