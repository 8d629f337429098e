"""Rows of the sets of benchmarks/mistakes: each edit fits its trainer, and cells, laws and words exist."""

import ast
import re

import pytest

from benchmarks.mistakes import FOLDER, Edit, Mistake, MistakeSet
from conformance.judge.registry import asserted_laws
from conformance.plan.matrix import TRAINER_CELLS
from reference_trainer.checks import UsageError

SETS = {
    folder.name: MistakeSet(folder)
    for folder in (
        FOLDER,
        *(FOLDER / name for name in ("unseen", "unseen2", "unseen3", "unseen4", "unseen5", "unseen6")),
    )
}
ROWS = [(chosen, name) for chosen, found in SETS.items() for name in found.mistakes]
LAWS = {name for name, asserted in asserted_laws().items() if asserted.law.scope.of == "any trainer"}


@pytest.mark.parametrize(
    ("name", "mistakes", "trainers"),
    [
        ("mistakes", 40, 18),
        ("unseen", 10, 12),
        ("unseen2", 12, 12),
        ("unseen3", 0, 6),
        ("unseen4", 12, 10),
        ("unseen5", 12, 10),
        ("unseen6", 20, 10),
    ],
)
def test_a_set_has_mistakes_in_its_trainers(name: str, mistakes: int, trainers: int) -> None:
    found = SETS[name]
    assert (len(found.mistakes), len(found.subjects)) == (mistakes, trainers)
    assert {row.trainer for row in found.mistakes.values()} <= found.subjects.keys()


@pytest.mark.parametrize(("chosen", "name"), ROWS)
def test_a_row_has_an_edit_that_fits_and_names_that_exist(chosen: str, name: str) -> None:
    row = SETS[chosen].mistakes[name]
    ast.parse(row.patched(SETS[chosen].subjects[row.trainer].file.read_text()))
    assert row.cells in {cell.id for cell in TRAINER_CELLS}
    assert {*row.laws} <= LAWS
    assert row.words
    assert all(re.compile(word) for word in row.words)


def test_an_edit_must_fit_once() -> None:
    edits = [Edit(old="import", new="")]
    row = Mistake(trainer="moe", what="", cells="", first="", words=[], edits=edits)
    with pytest.raises(UsageError, match=r"moe\.py has this \d+ times"):
        row.patched("import a; import b")


def test_all_words_must_be_in_the_text_of_a_cause() -> None:
    row = Mistake(trainer="moe", what="", cells="", first="", words=["Norm", r"2(\.0)? ?x"], edits=[])
    assert row.is_named("the norm\nis 2.0 x")
    assert not row.is_named("the norm")
