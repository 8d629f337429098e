"""Cells of the project: each value of each axis stands alone, and exactly the refused cells are excluded."""

import itertools
from collections.abc import Iterator

import pytest

from conformance.detection.case_judge import the_matrix
from conformance.matrix_lock.derivation import covering_cells, estimated_s
from conformance.plan.cells import AxisValue, Cell, axis_default, axis_names, cell_from_axes
from conformance.plan.content import Exclusion, Values

MATRIX = the_matrix()
CONTENT = MATRIX.content
VALUES: dict[str, Values] = {
    axis: list(dict.fromkeys([axis_default(axis), *CONTENT.axes.get(axis, []), *CONTENT.alone.get(axis, [])]))
    for axis in {**CONTENT.axes, **CONTENT.alone}
}
FEATURES = [(axis, value) for axis, values in VALUES.items() for value in values if value != axis_default(axis)]


def possible(cell: Cell) -> bool:
    return CONTENT.exclusion_of(cell) is None


def needed(featured: Cell, fixed: set[str]) -> int | None:
    """Return the number of other features with which a cell is possible: at most two, and else None."""
    cells = [featured]
    for count in range(3):
        if any(map(possible, cells)):
            return count
        cells = [cell.but(**{axis: value}) for cell in cells for axis, value in remedies(cell) if axis not in fixed]
    return None


def remedies(cell: Cell) -> list[tuple[str, AxisValue]]:
    """Return the features that could make a cell possible: those of axes of the rule that excludes the cell."""
    rule = CONTENT.exclusion_of(cell)
    return [(axis, value) for axis, value in FEATURES if rule is not None and axis in rule.axes - {"mesh"}]


@pytest.mark.parametrize(("axis", "value"), FEATURES, ids=str)
def test_every_value_is_alone_somewhere(axis: str, value: AxisValue) -> None:
    cells = [Cell(mesh=str(mesh)).but(**{axis: value}) for mesh in (VALUES["mesh"] if axis != "mesh" else [value])]
    least = min(count for cell in cells if (count := needed(cell, {axis, "mesh"})) is not None)
    own = 0 if axis in ("mesh", "seed") else 1
    assert min(cell.features for cell in MATRIX.cells.values() if getattr(cell, axis) == value) == least + own


def refusal(cell: Cell) -> str:
    """Return the reason for which no trainer can have the configuration of a cell; empty if one can."""
    try:
        return "" if cell.config else "no configuration"
    except ValueError as error:
        return str(error)


def test_no_cell_of_the_matrix_is_excluded_or_refused() -> None:
    cells = MATRIX.cells.values()
    assert [cell.id for cell in cells if not possible(cell)] == []
    assert {cell.id: why for cell in cells if (why := refusal(cell))} == {}


def values_of_sections() -> dict[str, list[AxisValue]]:
    """Return the values of sections with axes that no other section has, such as pipelines."""
    sections: dict[str, list[AxisValue]] = {}
    for section in CONTENT.cells.values():
        own = section.axes or {}
        for axis, listed in own.items() if own.keys() - VALUES.keys() else ():
            sections.setdefault(axis, []).extend(listed)
    return sections


def decided_by(exclusion: Exclusion) -> list[Cell]:
    """Combinations of the axes that decide a rule, those that the rule excludes."""
    sections = values_of_sections()
    axes: dict[str, list[AxisValue]] = {
        axis: list(dict.fromkeys([axis_default(axis), *VALUES.get(axis, []), *sections.get(axis, [])]))
        for axis in axis_names()
        if axis in exclusion.axes
    }
    cells = (cell_from_axes(dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values()))
    return [cell for cell in cells if exclusion.matches(cell)]


def with_one_feature_more(cell: Cell, exclusion: Exclusion) -> Iterator[Cell]:
    in_sections = [(axis, value) for axis, listed in values_of_sections().items() for value in listed]
    for axis, value in FEATURES + in_sections:
        if axis not in exclusion.axes:
            yield cell.but(**{axis: value})


def excluded_by(exclusion: Exclusion) -> list[Cell]:
    """Return the smallest cells that a rule excludes and no other one does, without and with one feature more."""
    others = [rule for rule in CONTENT.exclusions if rule is not exclusion]
    bases = decided_by(exclusion)
    for features in sorted({cell.features + more for cell in bases for more in (0, 1)}):
        near = (cell for cell in bases if features - 1 <= cell.features <= features)
        cells = (each for cell in near for each in (cell, *with_one_feature_more(cell, exclusion)))
        smallest = [cell for cell in cells if cell.features == features]
        if alone := [cell for cell in smallest if not any(rule.matches(cell) for rule in others)]:
            return alone
    return []


@pytest.mark.parametrize("exclusion", CONTENT.exclusions, ids=lambda rule: rule.when)
def test_each_exclusion_is_a_refusal(exclusion: Exclusion) -> None:
    """No trainer accepts the cells of a rule, and no other rule excludes the ones that are tried."""
    cells = excluded_by(exclusion)
    assert cells, "other rules exclude all of this"
    assert [cell.id for cell in cells if not refusal(cell)] == []


def test_a_covering_array_counts_the_cells_that_are_there() -> None:
    axes: dict[str, Values] = {"mesh": ["dp2", "tp2"], "accumulation": [1, 2], "offload": ["none", "cpu"]}
    whole = covering_cells(CONTENT, axes, 2, earlier=[], share=1.0)
    assert covering_cells(CONTENT, axes, 2, earlier=whole, share=1.0) == []
    rest = covering_cells(CONTENT, axes, 2, earlier=whole[:2], share=1.0)
    for first, second in itertools.combinations(axes, 2):
        met = {(getattr(cell, first), getattr(cell, second)) for cell in (*whole[:2], *rest)}
        assert met == set(itertools.product(axes[first], axes[second]))
    half = covering_cells(CONTENT, axes, 2, earlier=[], share=0.5)
    assert 0 < len(half) < len(whole)


def test_more_work_takes_longer() -> None:
    more: list[dict[str, AxisValue]] = [{"mesh": "dp4"}, {"mesh": "tp2"}, {"accumulation": 4}, {"steps": 8}]
    more += [
        {"saved_on": "same"},
        {"precision": "bf16-mp"},
        {"init": "checkpoint"},
        {"compile": True},
        {"model": "deep"},
    ]
    for changes in more:
        assert estimated_s(Cell().but(**changes)) > estimated_s(Cell()), changes
