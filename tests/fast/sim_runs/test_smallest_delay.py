"""Search for the fewest delayed operators: single candidates first, then both ends of the range by bisection."""

from collections.abc import Callable

import pytest

from conformance.sim_runs.races.smallest import smallest_delay

LAST = 1000


def needing(*numbers: int) -> tuple[Callable[[int, int], bool], list[tuple[int, int]]]:
    """Return a program that differs if all of some operators are delayed, and the list of ranges that are tried."""
    tried: list[tuple[int, int]] = []

    def differs(first: int, last: int) -> bool:
        tried.append((first, last))
        return all(first <= number <= last for number in numbers)

    return differs, tried


def test_a_candidate_is_tried_first() -> None:
    differs, tried = needing(70)
    assert smallest_delay(differs, [3, 70, 90], LAST, runs=40) == (70, 70)
    assert tried == [(3, 3), (70, 70)]


@pytest.mark.parametrize("needed", [(70,), (1,), (LAST,), (70, 75), (1, LAST)])
def test_the_range_is_cut_at_both_ends(needed: tuple[int, ...]) -> None:
    differs, tried = needing(*needed)
    assert smallest_delay(differs, [3], LAST, runs=40) == (needed[0], needed[-1])
    assert len(tried) <= 2 + 2 * 10


def test_no_range_differs() -> None:
    differs, tried = needing(LAST + 1)
    assert smallest_delay(differs, [], LAST, runs=40) is None
    assert tried == [(1, LAST)]


@pytest.mark.parametrize("runs", range(1, 20))
def test_the_answer_of_a_search_that_ends_early_was_run(runs: int) -> None:
    differs, tried = needing(70)
    found = smallest_delay(differs, [3], LAST, runs=runs)
    assert len(tried) <= runs
    assert found is None if runs == 1 else found in tried and differs(*found)
