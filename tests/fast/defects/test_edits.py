"""Texts of a function's source are replaced, and nothing else of it."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.defects.edits import FILE, Edit, edited, rows
from conformance.defects.injection import NotInjectable
from reference_trainer.strict_yaml import ConfigError

HERE = __name__


def _doubled(function: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> int:
        return 2 * function(*args)

    return wrapper


@_doubled
def total(start: int) -> int:
    if start > 0:
        start += 1
    for _ in range(2):
        start += 10
    return start


class Counter:
    count = 0

    def add(self) -> None:
        self.count += 1
        self.count += 1


def edit(target: str, old: str, **fields: Any) -> Edit:
    return Edit(target=f"{HERE}:{target}", old=old, **fields)


@pytest.mark.parametrize(
    ("change", "expected", "twin"),
    [
        (edit("total", "start += 10"), 4, 84),
        (edit("total", "start += 10", new="start += 1", twin="start += 2"), 8, 12),
        (edit("total", "start += 1", count=2, new="start += 2"), 86, None),
        (edit("total", "start += 1\n", new="pass\n", twin="start += 1; start += 1\n"), 42, 46),
        (edit("total", "    if start > 0:\n        start += 1\n", new=""), 42, None),
        (edit("total", "range(2)", new="range(3)"), 64, None),
        (edit("total", "start += 1\n", new="raise ZeroDivisionError\n"), None, None),
    ],
)
def test_a_text_is_replaced(change: Edit, expected: int | None, twin: int | None) -> None:
    with edited([change], benign=False):
        if expected is None:
            with pytest.raises(ZeroDivisionError) as caught:
                total(1)
            assert str(caught.traceback[-1].path) == __file__
            assert "start += 1" in str(caught.traceback[-1].statement)
        else:
            assert total(1) == expected
    if twin is not None:
        with edited([change], benign=True):
            assert total(1) == twin
    assert total(1) == 44


def test_all_occurrences_in_a_method_are_replaced_with_other_edits() -> None:
    counter = Counter()
    changes = [edit("Counter.add", "self.count += 1", new="self.count += 5", count=2), edit("total", "start += 10")]
    with edited(changes, benign=False):
        counter.add()
        assert total(1) == 4
    with edited(changes, benign=True):
        counter.add()
    counter.add()
    assert counter.count == 10 + 4 + 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit("total", "start += 3"), r"total has this 0 times and not 1: start \+= 3"),
        (edit("total", "start += 1"), r"total has this 2 times and not 1: start \+= 1"),
        (edit("nothing", "start += 1"), r"test_edits has no nothing"),
    ],
)
def test_a_text_that_torch_has_not_is_an_error(change: Edit, message: str) -> None:
    with pytest.raises(NotInjectable, match=message), edited([change], benign=False):
        pytest.fail("never reached")


def test_a_row_with_a_mistake_is_an_error_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "edits.yaml"
    file.write_text(FILE.read_text().replace("  laws:", "  law:", 1))
    with pytest.raises(ConfigError, match=r"edits.yaml:\d+: .*law"):
        rows(file)
