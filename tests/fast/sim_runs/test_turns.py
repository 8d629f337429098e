"""Turns of ranks that are threads: each runs alone until it waits, in an order that no operating system changes."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

from conformance.sim_runs.pytorch_tests.turns import Condition, Turns, has_turns


def run(ranks: int, call: Callable[[int], None], *, start_reversed: bool = False) -> None:
    turns = Turns(ranks)

    def thread_runs(rank: int) -> None:
        with suppress(SystemExit):
            turns.run(rank, partial(call, rank))

    threads = [threading.Thread(target=thread_runs, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in reversed(threads) if start_reversed else threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("start_reversed", [False, True])
def test_ranks_run_in_order_from_one_wait_to_the_next(start_reversed: bool) -> None:
    steps: list[tuple[str, int]] = []
    arrived: set[int] = set()

    def rank_runs(rank: int) -> None:
        steps.append(("before", rank))
        arrived.add(rank)
        with Condition() as condition:
            assert condition is None
        Condition().wait_for(lambda: len(arrived) == 3)
        steps.append(("after", rank))

    run(3, rank_runs, start_reversed=start_reversed)
    # The last rank need not wait, and its turn goes on.
    assert steps == [*(("before", rank) for rank in range(3)), *(("after", rank) for rank in (2, 0, 1))]


def test_a_rank_that_ends_or_fails_lets_the_others_run() -> None:
    seen: list[int] = []

    def rank_runs(rank: int) -> None:
        if rank == 0:
            Condition().wait_for(lambda: 1 in seen)
        seen.append(rank)
        if rank == 1:
            raise SystemExit

    run(2, rank_runs)
    assert seen == [1, 0]


def test_other_threads_take_no_turns() -> None:
    assert not has_turns()
