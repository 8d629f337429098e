"""Rows of benchmarks/mistakes: each edit fits its trainer, and cells, laws and words exist."""

import ast
import re

import pytest

from benchmarks.mistakes import SUBJECTS, TRAINERS, Edit, Mistake, mistakes
from conformance.judge.registry import asserted_laws
from conformance.plan.matrix import TRAINER_CELLS
from reference_trainer.checks import UsageError

ROWS = mistakes()
LAWS = {name for name, asserted in asserted_laws().items() if asserted.law.scope.of == "any trainer"}


def test_forty_mistakes_are_in_six_trainers() -> None:
    files = {file.stem for file in TRAINERS.glob("[a-z]*.py")}
    assert (len(ROWS), {row.trainer for row in ROWS.values()}, files) == (40, {*SUBJECTS}, {*SUBJECTS})


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_an_edit_that_fits_and_names_that_exist(name: str) -> None:
    row = ROWS[name]
    ast.parse(row.source())
    assert row.cells in {cell.id for cell in TRAINER_CELLS}
    assert {*row.laws} <= LAWS
    assert row.words
    assert all(re.compile(word) for word in row.words)


def test_an_edit_must_fit_once() -> None:
    edits = [Edit(old="import", new="")]
    row = Mistake(trainer="moe", what="", cells="", first="", words=[], edits=edits)
    with pytest.raises(UsageError, match=r"moe\.py has this \d+ times"):
        row.source()


def test_all_words_must_be_in_the_text_of_a_cause() -> None:
    row = Mistake(trainer="moe", what="", cells="", first="", words=["Norm", r"2(\.0)? ?x"], edits=[])
    assert row.is_named("the norm\nis 2.0 x")
    assert not row.is_named("the norm")
