"""AXIS-1 itself: every axis has a proof, every value of the matrix is judged, and no proof passes a dead axis."""

import msgspec
import pytest

from conformance.laws.axes.proofs import PROOFS, neighbours, prove
from conformance.laws.fixtures import Run
from conformance.laws.registry import asserted_laws
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell, axis_names
from conformance.plan.matrix import Matrix, load_matrix
from conformance.plan.substrates import SIMULATED
from conformance.project import PROJECT
from conformance.run.record import Record, read_record

MATRIX: Matrix = load_matrix(PROJECT / "matrix.yaml")
CELLS = list(
    dict.fromkeys(
        cell for name, family in MATRIX.families.items() if "AXIS-1" in family.laws for cell in MATRIX.cells(name)
    )
)
DEAD = {(axis, getattr(shown, axis)): (shown, neighbour) for c in CELLS for axis, shown, neighbour in neighbours(c)}


MODELLED = {name for name, entry in asserted_laws().items() if entry.law.substrates == SIMULATED} | {"MEM-10"}
"""Laws that compare with a model of the cell, and so fail if the cell's run ignores an axis value."""


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


def test_every_value_of_the_matrix_is_looked_at() -> None:
    base = Cell(mesh="dp1")
    families = [name for name, family in MATRIX.families.items() if not set(family.laws) <= MODELLED]
    used = {(axis, getattr(cell, axis)) for name in families for cell in MATRIX.cells(name) for axis in PROOFS}
    assert {(axis, value) for axis, value in used if value != getattr(base, axis)} == DEAD.keys()


@pytest.mark.parametrize(("axis", "value"), DEAD, ids=str)
def test_a_dead_axis_value_is_noticed(run: Run, axis: str, value: object) -> None:
    """The neighbour's run stands in for that of the cell, as if the trainer had ignored the value."""
    cell, neighbour = DEAD[axis, value]
    record = run(neighbour)
    with pytest.raises(ConformanceFailure):
        prove(axis, relabelled(record, cell), record)
