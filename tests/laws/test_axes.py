"""AXIS-1 itself: every axis has a proof, every value of the matrix is judged, and no proof passes a dead axis."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from conformance.laws.axes.numerics import loss_scale_takes_effect
from conformance.laws.axes.proofs import PROOFS, neighbours, prove
from conformance.laws.fixtures import Run
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell, axis_names
from conformance.plan.matrix import Matrix, load_matrix
from conformance.project import PROJECT
from conformance.run.record import Record, read_record

MATRIX: Matrix = load_matrix(PROJECT / "matrix.yaml")
CELLS = [cell for cell in MATRIX.cells.values() if MATRIX.scopes["AXIS-1"].holds(cell)]
DEAD = {(axis, getattr(shown, axis)): (shown, neighbour) for c in CELLS for axis, shown, neighbour in neighbours(c)}


def relabelled(record: Record, cell: Cell) -> Record:
    """Return the record with the header of another cell."""
    content = read_record(record.directory)
    assert content is not None
    header = msgspec.structs.replace(content.header, cell=cell)
    return Record(record.directory, msgspec.structs.replace(content, header=header))


def test_every_axis_has_a_proof() -> None:
    assert tuple(PROOFS) == axis_names()


def test_an_axis_without_a_proof_is_an_error(run: Run) -> None:
    record = run(Cell())
    with pytest.raises(ValueError, match=r"no proof that axis `colour` takes effect: add one"):
        prove("colour", record, record)


def test_every_value_of_the_axes_of_the_matrix_is_looked_at() -> None:
    """Values of one section alone are those of simulated worlds and of whole numbers, judged by models of them."""
    base, content = Cell(mesh="dp1"), MATRIX.content
    values = {(axis, value) for axes in (content.axes, content.alone) for axis in axes for value in axes[axis]}
    assert {(axis, value) for axis, value in values if value != getattr(base, axis)} <= DEAD.keys()


def test_every_neighbour_is_a_cell_that_can_run() -> None:
    for cell in CELLS:
        for _, *pair in neighbours(cell):
            assert all(each.config for each in pair), "none raises"


@pytest.mark.parametrize(("axis", "value"), DEAD, ids=str)
def test_a_dead_axis_value_is_noticed(run: Run, axis: str, value: object) -> None:
    """The neighbour's run stands in for that of the cell, as if the trainer had ignored the value."""
    cell, neighbour = DEAD[axis, value]
    record = run(neighbour)
    with pytest.raises(ConformanceFailure):
        prove(axis, relabelled(record, cell), record)


def scaled_run(*scales_of_skipped: float) -> Any:
    """Run from a scale of 8, with a step that is taken and others that are skipped with these scales."""
    steps = [SimpleNamespace(loss_scale=scale, skipped=True) for scale in scales_of_skipped]
    taken = SimpleNamespace(loss_scale=8.0, skipped=False)
    config = SimpleNamespace(loss_scale=SimpleNamespace(initial=8.0))
    return SimpleNamespace(ranks=[SimpleNamespace(steps=[taken, *steps])], config=config)


def test_a_scale_that_has_grown_may_overflow_and_the_first_may_not() -> None:
    loss_scale_takes_effect(scaled_run(64.0), scaled_run(16.0))
    with pytest.raises(ConformanceFailure, match="no step is skipped"):
        loss_scale_takes_effect(scaled_run(), scaled_run())
    with pytest.raises(ConformanceFailure, match=r"although 8\.0 fits"):
        loss_scale_takes_effect(scaled_run(64.0), scaled_run(8.0))
