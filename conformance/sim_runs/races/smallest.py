"""Smallest range of delayed operators with which a program still computes other bits than eagerly."""

from collections.abc import Callable, Sequence


def smallest_delay(
    differs: Callable[[int, int], bool], candidates: Sequence[int], last: int, *, runs: int
) -> tuple[int, int] | None:
    """Return the first and the last number of the fewest delayed operators that change bits; None if all do not.

    `differs` runs the program with a range of its operators delayed. One operator of the unordered pairs is often
    enough: `candidates` are tried first. Otherwise the range of all operators, 1 to `last`, is cut at its end, then at
    its begin, by bisection. After the given number of runs the smallest range until then is the answer.
    """
    budget = iter(range(runs))
    for number in candidates:
        if next(budget, None) is None:
            return None
        if differs(number, number):
            return number, number
    if next(budget, None) is None or not differs(1, last):
        return None
    end = _smallest(1, last, lambda middle: next(budget, None) is not None and differs(1, middle))
    begin = -_smallest(-end, -1, lambda middle: next(budget, None) is not None and differs(-middle, end))
    return begin, end


def _smallest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the smallest number of a range for which a monotonous condition holds; it holds for `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return high
