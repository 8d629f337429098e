"""Classic mistakes of trainers: each file marks its wrong lines, and has a trainer with the mistake and one without."""

from pathlib import Path

import pytest

from benchmarks.located.mistakes import FOLDER, MAX_LINES, SHOWN, Mistake, mistakes
from conformance.plan.matrix import TRAINER_CELLS
from conformance.project import PROJECT
from tests.support.source_code import tree

MISTAKES = mistakes()
TRAINER = "trainer.py"


def test_each_file_but_the_trainer_has_a_mistake_that_is_shown_on_a_cell() -> None:
    files = {file.name for file in FOLDER.glob("*.py")}
    assert {mistake.file.name for mistake in MISTAKES.values()} == files - {"__init__.py", TRAINER}
    assert MISTAKES.keys() == SHOWN.keys()
    assert {shown.cell for shown in SHOWN.values()} <= {cell.id for cell in TRAINER_CELLS}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_is_on_few_lines_outside_of_the_right_trainer(mistake: Mistake) -> None:
    assert mistake.file.stem.replace("_", "-") == mistake.id
    assert 1 <= len(mistake.lines) <= MAX_LINES
    code = tree(mistake.file.relative_to(PROJECT).as_posix())
    classes = {node.name: node for node in code.body if hasattr(node, "name")}
    assert {"Wrong", "Right"} <= classes.keys()
    (around,) = [name for name, node in classes.items() if node.lineno < mistake.lines[0] <= (node.end_lineno or 0)]
    assert "Wrong" in around


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("x = 1  # mistake: a\ny = 2\nz = 3  # mistake: a\n", r"marks \['a'\] on lines \[1, 3\]"),
        ("x = 1  # mistake: a\ny = 2  # mistake: b\n", r"marks \['a', 'b'\]"),
        ("x = 1  # mistake: a\n" * (MAX_LINES + 1), "at most 3 in a row"),
    ],
)
def test_marks_that_name_no_place_are_refused(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(content)
    with pytest.raises(ValueError, match=problem):
        mistakes(tmp_path)


def test_adjacent_lines_are_one_place(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("x = 1\ny = 2  # mistake: a-b\nz = 3  # mistake: a-b\n")
    (found,) = mistakes(tmp_path).values()
    assert (found.id, list(found.lines)) == ("a-b", [2, 3])
    assert found.wrong.endswith("wrong.py:Wrong")
