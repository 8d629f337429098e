"""The place of every defect is stated, on a cell that shows the defect."""

from pathlib import Path
from typing import get_args

import pytest

from conformance.defects.catalogue import signatures
from conformance.defects.places import FILE, places
from conformance.detection.case_judge import the_matrix
from conformance.plan.selection import parse
from conformance.report.location import Stage
from reference_trainer.strict_yaml import ConfigError

CELLS = {defect.id: defect.cells for defect in signatures()}


def test_each_defect_has_a_place_and_each_place_a_defect() -> None:
    assert places().keys() == CELLS.keys()


def test_each_place_is_on_one_cell_of_its_defect() -> None:
    cells = the_matrix().cells
    for defect, place in places().items():
        selection = parse(CELLS[defect])
        shown_on = [name for name, cell in cells.items() if selection(cell)]
        assert place.cell in shown_on if len(shown_on) > 1 else not place.cell, defect


def test_stages_are_those_of_locations() -> None:
    assert {stage for place in places().values() for stage in place.stages} <= {*get_args(Stage)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("name: rope_table", "name: rope_table("), r"`rope_table\(` is no regular expression: missing \)"),
        (("stages: [loss], name: ''", "stages: [loss]"), "a place has either `stages` and `name`, or `where` and"),
        (("where: sweep, ", "where: sweep, name: '', "), "a place has either `stages` and `name`, or `where` and"),
        (("where: sweep, ", "where: sweep, ranks: [1], "), "`ranks` are those of a tensor, not of `where`"),
        (("where: race", "where: raec"), "raec"),
    ],
)
def test_a_row_with_a_mistake_is_an_error_with_its_line(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    file = tmp_path / FILE.name
    text = FILE.read_text()
    assert change[0] in text
    file.write_text(text.replace(*change, 1))
    with pytest.raises(ConfigError, match=rf"places.yaml:\d+: .*{message}"):
        places(file)
