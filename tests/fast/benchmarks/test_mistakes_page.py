"""docs/mistakes.md: its rows are those that are kept, and can be read on a page of normal width."""

import pytest

from benchmarks.mistakes import FOLDER, Mistake, MistakeSet
from benchmarks.mistakes.page import PAGE, Row, Rows, Run, as_markdown, keep, written
from reference_trainer.checks import UsageError

KNOWN = {
    name: Mistake(trainer="moe", what="one thing is wrong", cells="", first="", words=[], edits=[])
    for name in ("seen", "unseen")
}
RUN = Run(title="First", about="Of the suite.", why={"unseen": "no law looks", "dpo": "an alarm"})


def row(name: str, *, is_right: bool, text: str = "") -> Row:
    return Row(
        name=name,
        is_caught=is_right,
        outcome="fail",
        failing=[],
        first_law="",
        text=text,
        is_right=is_right,
        seconds=1.0,
    )


def test_the_page_has_the_runs_that_are_kept() -> None:
    page = PAGE.read_text()
    assert page == written(page), "python -m benchmarks.mistakes writes it"


def test_no_row_of_the_page_is_wider_than_a_page() -> None:
    assert [line for line in PAGE.read_text().splitlines() if len(line) > 120] == []


def test_a_mistake_is_a_row_of_verdicts_and_an_item_with_what_is_told() -> None:
    mistakes = [row("seen", is_right=True, text="the norm\nis <2 x> it"), row("unseen", is_right=False)]
    correct = [row("rwkv", is_right=True), row("dpo", is_right=False, text="told")]
    text = as_markdown(RUN, Rows(mistakes, correct), KNOWN, size=5)
    assert "| seen      | yes      | yes                 |\n| unseen    | **no**   | **no**" in text
    assert "- **seen** (moe): one thing is wrong. Told: the norm is &lt;2 x> it\n" in text
    assert "- **unseen** (moe): one thing is wrong. Nothing is told. **Not right**: no law looks" in text
    assert "1 of 2 mistakes are caught, 1 with the right first cause." in text
    assert "1 of 2 trainers without mistakes are conformant: rwkv." in text
    assert "- **dpo** is not: an alarm Told: told" in text
    assert "**1 of the 5 rows were not judged.**" in text


def test_a_set_without_mistakes_has_no_table() -> None:
    text = as_markdown(RUN, Rows([], [row("rwkv", is_right=True)]), {}, size=1)
    assert "|" not in text
    assert "0 of 0" not in text


def test_a_wrapped_line_does_not_begin_an_item() -> None:
    told = "x" * 60 + " " + " + y" * 40
    text = as_markdown(RUN, Rows([row("seen", is_right=True, text=told)], []), KNOWN, size=2)
    items = [line for line in text.splitlines() if line.lstrip().startswith(("- ", "+ "))]
    assert len(items) == 1


def test_rows_of_a_run_that_is_not_described_are_refused() -> None:
    with pytest.raises(UsageError, match="does not describe the run third"):
        keep("third", Rows([], []), MistakeSet(FOLDER))
