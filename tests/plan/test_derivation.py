"""Cells of the project: each value of each axis stands alone, and what is excluded is refused and nothing else."""

import itertools
from collections.abc import Iterator

import pytest

from conformance.plan.cells import AxisValue, Cell, axis_default, cell_from_axes
from conformance.plan.content import Exclusion, Values
from conformance.plan.cost import estimated_s
from conformance.plan.derivation import covering_cells
from conformance.plan.matrix import load_matrix
from conformance.project import PROJECT

MATRIX = load_matrix(PROJECT / "matrix.yaml")
CONTENT = MATRIX.content
VALUES: dict[str, Values] = {
    axis: list(dict.fromkeys([axis_default(axis), *CONTENT.axes.get(axis, []), *CONTENT.alone.get(axis, [])]))
    for axis in {**CONTENT.axes, **CONTENT.alone}
}
FEATURES = [(axis, value) for axis, values in VALUES.items() for value in values if value != axis_default(axis)]
SINGLES = [planned.cell for planned in MATRIX.planned if planned.section == "singles"]
NO_FEATURES = ("mesh", "seed")


def possible(cell: Cell) -> bool:
    return CONTENT.exclusion_of(cell) is None


def needed(axis: str, value: AxisValue, mesh: str) -> int | None:
    """Return the number of other features that a feature needs on a mesh; None if it is impossible with two."""
    plain = Cell(mesh=mesh).but(**{axis: value})
    if possible(plain):
        return 0
    others = [(name, other) for name, other in FEATURES if name not in (axis, *NO_FEATURES)]
    for count in (1, 2):
        for chosen in itertools.combinations(others, count):
            names = [name for name, _ in chosen]
            if len(set(names)) == count and possible(plain.but(**dict(chosen))):
                return count
    return None


@pytest.mark.parametrize(("axis", "value"), FEATURES, ids=str)
def test_every_value_is_alone_on_each_mesh_of_the_singles_on_which_it_can_be(axis: str, value: AxisValue) -> None:
    """With as few other features as it needs, so that a failure in a combined cell has a plain neighbour."""
    if axis == "mesh":
        assert Cell(mesh=str(value)) in SINGLES
        return
    meshes = [mesh for mesh in CONTENT.cells["singles"].meshes or [] if needed(axis, value, mesh) is not None]
    for mesh in meshes or [None]:
        own = 0 if axis in NO_FEATURES else 1
        least = min((cell.features - own for cell in SINGLES if has(cell, axis, value, mesh)), default=None)
        assert least == (needed(axis, value, mesh) if mesh else least)
        assert least is not None, f"{axis} = {value} is alone nowhere"


def has(cell: Cell, axis: str, value: AxisValue, mesh: str | None) -> bool:
    return getattr(cell, axis) == value and mesh in (None, cell.mesh)


def test_no_cell_of_the_matrix_is_excluded_or_refused() -> None:
    wrong = [cell.id for cell in MATRIX.cells.values() if not possible(cell)]
    assert wrong == []
    for cell in MATRIX.cells.values():
        assert cell.config.steps == cell.steps, "no cell raises"


def cells_of(exclusion: Exclusion) -> Iterator[Cell]:
    """Yield the cells that a rule excludes: combinations of the axes that decide it, without and with one feature."""
    axes = {axis: values for axis, values in VALUES.items() if axis in exclusion.axes}
    for values in itertools.product(*axes.values()):
        cell = cell_from_axes(dict(zip(axes, values, strict=True)))
        if exclusion.matches(cell):
            yield cell
            yield from (cell.but(**{axis: value}) for axis, value in FEATURES if axis not in axes)


def excluded_by(exclusion: Exclusion) -> list[Cell]:
    """Return the smallest cells that a rule excludes and no other one does."""
    others = [rule for rule in CONTENT.exclusions if rule is not exclusion]
    cells = [cell for cell in cells_of(exclusion) if not any(rule.matches(cell) for rule in others)]
    fewest = min((cell.features for cell in cells), default=0)
    return [cell for cell in cells if cell.features == fewest]


@pytest.mark.parametrize("exclusion", CONTENT.exclusions, ids=lambda rule: rule.when)
def test_each_exclusion_is_a_refusal(exclusion: Exclusion) -> None:
    """What the rule says cannot be is refused, before any rank trains; by this rule's reason, since no other holds."""
    cells = excluded_by(exclusion)
    assert cells, "other rules exclude all of this"
    accepted = []
    for cell in cells:
        try:
            _ = cell.config
        except ValueError:
            continue
        accepted.append(cell.id)
    assert accepted == []


def test_a_covering_array_counts_the_cells_that_are_there() -> None:
    axes: dict[str, Values] = {"mesh": ["dp2", "tp2"], "accumulation": [1, 2], "offload": ["none", "cpu"]}
    whole = covering_cells(CONTENT, axes, 2, earlier=[], share=1.0)
    assert covering_cells(CONTENT, axes, 2, earlier=whole, share=1.0) == []
    rest = covering_cells(CONTENT, axes, 2, earlier=whole[:2], share=1.0)
    for first, second in itertools.combinations(axes, 2):
        met = {(getattr(cell, first), getattr(cell, second)) for cell in (*whole[:2], *rest)}
        assert met == set(itertools.product(axes[first], axes[second]))


def test_a_share_of_the_combinations_takes_fewer_cells() -> None:
    axes: dict[str, Values] = {"mesh": ["dp2", "dp4", "tp2"], "accumulation": [1, 2, 4], "steps": [3, 8]}
    whole, half = (covering_cells(CONTENT, axes, 2, earlier=[], share=share) for share in (1.0, 0.5))
    assert 0 < len(half) < len(whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": "dp4"},
        {"mesh": "tp2"},
        {"accumulation": 4},
        {"steps": 8},
        {"saved_on": "same"},
        {"init": "checkpoint"},
        {"offload": "cpu"},
        {"compile": True},
        {"model": "deep"},
    ],
    ids=str,
)
def test_more_work_takes_longer(changes: dict[str, AxisValue]) -> None:
    assert estimated_s(Cell().but(**changes)) > estimated_s(Cell())
