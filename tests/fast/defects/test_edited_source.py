"""Statements of a function's source are replaced, and nothing else of it."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from conformance.defects.edited_source import edited
from conformance.defects.injection import NotInjectable

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


@pytest.mark.parametrize(
    ("statement", "into", "expected"),
    [
        ("start += 10", ["start += 10"], 44),
        ("start += 10", [], 4),
        ("start += 10", ["start += 1", "start += 2"], 16),
        ("start += 1", [], 42),
        ("if start > 0: start += 1", [], 42),
        ("start += 1", ["raise ZeroDivisionError"], None),
    ],
)
def test_a_statement_is_replaced(statement: str, into: list[str], expected: int | None) -> None:
    with edited(HERE, "total", statement, into=into):
        if expected is None:
            with pytest.raises(ZeroDivisionError) as caught:
                total(1)
            assert str(caught.traceback[-1].path) == __file__
            assert "start += 1" in str(caught.traceback[-1].statement)
        else:
            assert total(1) == expected
    assert total(1) == 44


def test_all_occurrences_in_a_method_are_replaced() -> None:
    counter = Counter()
    with edited(f"{HERE}:Counter", "add", "self.count += 1", into=["self.count += 5"]):
        counter.add()
    counter.add()
    assert counter.count == 12


def test_a_statement_that_torch_has_not_is_an_error() -> None:
    context = edited(HERE, "total", "start += 3", into=[])
    with pytest.raises(NotInjectable, match=r"total has no statement start \+= 3"), context:
        pytest.fail("never reached")
