"""Laws that need a further run are left out of some cells of a profile: no defect is lost, and no number of ranks."""

from pathlib import Path

import pytest

from conformance.defects.catalogue import defects
from conformance.detection.case_judge import the_matrix
from conformance.matrix_lock.derivation import derive
from conformance.matrix_lock.lock_file import lock_text, planned_cells
from conformance.matrix_lock.own_runs import with_own_runs
from conformance.plan.cells import Cell
from conformance.plan.content import compiled
from conformance.plan.lock import PlannedCell, lock_file
from conformance.plan.matrix import load_matrix
from reference_trainer.strict_yaml import load

MATRIX = the_matrix()
TEXT = """\
schema: 2
axes:
  mesh: [dp2]
  reshard: [default, never]
cells:
  singles: {note: each feature alone, meshes: [dp2]}
profiles:
  pr: {note: all, must: [singles], deadline_s: 60}
  quick: {note: all, must: [singles], deadline_s: 60, own_runs: new}
"""
PLAIN, NEVER = Cell(), Cell(reshard="never")


def shown(laws_by_cell: dict[Cell, list[str]]) -> set[str]:
    """Return the defects that the CPU shows to one of the laws of a cell."""
    facts = [(cell.facts(), {*laws}) for cell, laws in laws_by_cell.items()]
    return {
        defect.id
        for defect in defects()
        if "gloo" in defect.substrates
        for each, laws in facts
        if not laws.isdisjoint(defect.laws) and compiled(defect.cells).holds(each)
    }


def test_smoke_shows_no_defect_less() -> None:
    cells = MATRIX.profile_cells("smoke")
    judged = {cell: MATRIX.laws_in("smoke", cell) for cell in cells}
    assert shown(judged) == shown({cell: MATRIX.laws_on(cell) for cell in cells})
    assert sum(map(len, judged.values())) < sum(len(MATRIX.laws_on(cell)) for cell in cells)


def test_smoke_has_each_law_on_each_number_of_ranks() -> None:
    cells = MATRIX.profile_cells("smoke")
    holding = {(law, cell.world_size) for cell in cells for law in MATRIX.laws_on(cell)}
    assert {(law, cell.world_size) for cell in cells for law in MATRIX.laws_in("smoke", cell)} == holding


def test_laws_that_judge_the_training_of_a_cell_stay() -> None:
    left_out = {law for planned in MATRIX.planned for law in planned.nothing_new}
    assert left_out <= {law for law, scope in MATRIX.scopes.items() if scope.own_run}
    assert "PAR-1" not in left_out


def test_other_profiles_have_all_laws() -> None:
    for cell in MATRIX.profile_cells("pr"):
        assert MATRIX.laws_in("pr", cell) == MATRIX.laws_on(cell)


@pytest.fixture
def planned(tmp_path: Path) -> dict[Cell, PlannedCell]:
    """Cells of a small matrix."""
    return by_cell(tmp_path / "matrix.yaml", TEXT)


def by_cell(file: Path, text: str) -> dict[Cell, PlannedCell]:
    file.write_text(text)
    document = load(file)
    return {each.cell: each for each in with_own_runs(document, planned_cells(derive(document)))}


def test_a_run_without_a_new_fault_is_left_out(planned: dict[Cell, PlannedCell]) -> None:
    assert planned[PLAIN].nothing_new == (), "each law judges once"
    assert "STREAM-5" in planned[NEVER].nothing_new, "delays show faults that the plain cell shows, too"
    assert "MEM-1" not in planned[NEVER].nothing_new, "memory does"


def test_all_profiles_that_have_a_cell_must_agree(tmp_path: Path, planned: dict[Cell, PlannedCell]) -> None:
    another = TEXT + "  only: {note: one, must: [singles], cells: reshard = never, deadline_s: 60, own_runs: new}\n"
    assert by_cell(tmp_path / "other.yaml", another)[NEVER].nothing_new == ()
    assert planned[NEVER].nothing_new


def test_the_profile_alone_leaves_them_out(tmp_path: Path, planned: dict[Cell, PlannedCell]) -> None:
    file = tmp_path / "matrix.yaml"
    lock_file(file).write_text(lock_text(load(file), list(planned.values())))
    matrix = load_matrix(file)
    assert "STREAM-5" in matrix.laws_in("pr", NEVER)
    assert "STREAM-5" not in matrix.laws_in("quick", NEVER)
    assert len(matrix.cases("quick")) == len(matrix.cases("pr")) - len(planned[NEVER].nothing_new)
