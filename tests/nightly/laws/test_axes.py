"""AXIS-1 itself: every axis has a proof, every value of the matrix is judged, and no proof passes a dead axis."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from conformance.assertions.axes.effects import loss_scale_takes_effect
from conformance.assertions.axes.proofs import PROOFS, neighbours, prove
from conformance.assertions.fixtures import Run
from conformance.detection.case_judge import the_matrix
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import AxisValue, Cell, axis_names
from conformance.plan.matrix import Matrix
from conformance.run.record import Record, read_record

MATRIX: Matrix = the_matrix()
CELLS = [cell for cell in MATRIX.cells.values() if MATRIX.scopes["AXIS-1"].holds(cell)]
DEAD = {
    (axis, getattr(shown, axis), "pp" if shown.config.mesh.pp > 1 else "no pp"): (shown, neighbour)
    for cell in CELLS
    for axis, shown, neighbour in neighbours(cell)
}
"""Cells that show a value of an axis, and their neighbours, in pipelines and elsewhere."""


def relabelled(record: Record, cell: Cell) -> Record:
    """Return the record with the header of another cell."""
    content = read_record(record.directory)
    assert content is not None
    header = msgspec.structs.replace(content.header, cell=cell)
    return Record(record.directory, msgspec.structs.replace(content, header=header))


def test_every_axis_has_a_proof() -> None:
    """The reference trainer refuses uneven batches; for other trainers `SubjectRuns.evidence` needs their effect."""
    assert tuple(PROOFS) == tuple(name for name in axis_names() if name != "batches")


def test_an_axis_without_a_proof_is_an_error(run: Run) -> None:
    record = run(Cell())
    with pytest.raises(ValueError, match=r"no proof that axis `colour` takes effect: add one"):
        prove("colour", record, record)


def test_every_value_of_the_axes_of_the_matrix_is_looked_at() -> None:
    """Values of one section alone are those of simulated worlds and of whole numbers, judged by models of them."""
    base, content = Cell(mesh="dp1"), MATRIX.content
    values = {(axis, value) for axes in (content.axes, content.alone) for axis in axes for value in axes[axis]}
    looked_at = {(axis, value) for axis, value, _ in DEAD}
    assert {(axis, value) for axis, value in values if value != getattr(base, axis)} <= looked_at


def test_every_value_of_singles_in_pipelines_is_looked_at() -> None:
    """Pipelines have no separate mesh for norms, which needs two shards (`norms-on-one-shard`)."""
    sections = [MATRIX.content.cells[name] for name in ("pipeline-singles", "pipeline-singles-tp")]
    values = {(axis, value, "pp") for each in sections for axis in each.axes or {} for value in (each.axes or {})[axis]}
    assert values - DEAD.keys() == {("norms_in_tp", False, "pp")}


def test_modes_that_keep_groups_in_a_pipeline_are_compared_with_always() -> None:
    """By default a pipeline keeps all groups: `never` would be compared with itself."""
    compared = {
        shown.reshard: other.reshard
        for (axis, _, where), (shown, other) in DEAD.items()
        if axis == "reshard" and where == "pp"
    }
    assert compared == {"always": "default", "never": "always", "except-last": "always", "table": "always"}


def test_every_neighbour_is_a_cell_that_can_run() -> None:
    for cell in CELLS:
        for _, *pair in neighbours(cell):
            assert all(each.config for each in pair), "none raises"


@pytest.mark.parametrize(("axis", "value", "where"), DEAD, ids=str)
def test_a_dead_axis_value_is_noticed(run: Run, axis: str, value: AxisValue, where: str) -> None:
    """The neighbour's run stands in for that of the cell, as if the trainer had ignored the value."""
    cell, neighbour = DEAD[axis, value, where]
    record = run(neighbour)
    with pytest.raises(ConformanceFailure):
        prove(axis, relabelled(record, cell), record)


def test_the_model_of_pipelines_is_proved_without_a_pipeline(run: Run) -> None:
    """The search for the smallest failing cell, and `--cells`, ask for cells that the matrix has in pipelines only."""
    cell = Cell(mesh="dp2", model="cut")
    assert MATRIX.scopes["AXIS-1"].holds(cell)
    for axis, shown, neighbour in neighbours(cell):
        prove(axis, run(shown), run(neighbour))


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
