"""Expected duration of a session, on machines of any speed and number of processors."""

import pytest

from conformance.plan.duration import Workplace
from conformance.plan.lock import STARTUP_S

CELLS = [(6.0, 2), (2.0, 4), (4.0, 2)]
"""Durations on two processors, and world sizes."""


@pytest.mark.parametrize(
    ("processors", "workers", "cells_s"),
    [
        (1, 1, 12.0),  # the calibration of two ranks tells how slow one processor is
        (2, 1, 12.0),
        (4, 1, 6.0 + 1.0 + 4.0),  # four ranks do not share processors any more
        (4, 2, 6.0),  # no shorter than the longest cell; 10 s of 2 processors and 1 s of 4 are 6 s as well
        (16, 4, 6.0),
    ],
)
def test_worlds_gain_by_processors_and_sessions_by_workers(processors: int, workers: int, cells_s: float) -> None:
    assert Workplace(processors, workers, slower=1.0).session_s(CELLS) == pytest.approx(STARTUP_S + cells_s)


def test_a_slower_machine_takes_longer_for_everything() -> None:
    expected_s = [Workplace(2, 1, slower).session_s(CELLS) for slower in (1.0, 3.5)]
    assert expected_s[1] == pytest.approx(3.5 * expected_s[0])


def test_worlds_that_hold_all_processors_gain_nothing_by_workers() -> None:
    wide = [(2.0, 8)] * 3
    assert Workplace(8, 2, 1.0).session_s(wide) == pytest.approx(STARTUP_S + 3 * 2.0 * 2 / 8)


def test_no_cell_takes_no_time() -> None:
    assert Workplace(2, 1, 1.0).cells_s([]) == 0.0
