"""Turns of ranks that are threads of one process: each run executes their operators in the same order.

Torch's tests with a group of threads leave that order to the operating system. Two runs then number operators, and draw
from the generators that the threads share, in another order: their bits cannot be compared.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

_thread = threading.local()


class Turns:
    """Turns of a number of ranks. One runs until it waits for another or ends, then the next in a fixed order."""

    def __init__(self, ranks: int) -> None:
        self._order = deque(range(ranks))
        """Ranks that have not ended, that of the running one first."""
        self._changed = threading.Condition()

    def run(self, rank: int, call: Callable[[], None]) -> None:
        """Call a function as a rank, from its first turn to its end."""
        _thread.wait = lambda holds: self._wait(rank, holds)
        self._take(rank)
        try:
            call()
        finally:
            self._pass(end=True)
            del _thread.wait

    def _wait(self, rank: int, holds: Callable[[], bool]) -> None:
        while not holds():
            self._pass(end=False)
            self._take(rank)

    def _take(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._order[0] == rank)

    def _pass(self, *, end: bool) -> None:
        with self._changed:
            if end:
                self._order.popleft()
            else:
                self._order.rotate(-1)
            self._changed.notify_all()


def has_turns() -> bool:
    """Return whether the calling thread is a rank that takes turns."""
    return hasattr(_thread, "wait")


class Condition:
    """Condition of ranks that take turns, in the place of `threading.Condition`: none else runs while one holds it."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Let the other ranks run until a condition holds."""
        _thread.wait(holds)

    def notify(self) -> None:
        """Do nothing: a rank that waits looks at its condition in each of its turns."""

    notify_all = notify


def take_turns(case: Any, groups: Any) -> None:
    """Let the ranks of torch's tests with threads take turns: `MultiThreadedTestCase`, and module of its groups."""
    spawn, run, barrier = case._spawn_threads, case._run.__func__, groups._store_based_barrier

    def spawn_in_turns(self: Any) -> None:
        type(self).turns = Turns(self.world_size)
        spawn(self)

    def run_in_turns(cls: Any, /, test: str, rank: int, ranks: int, **options: Any) -> None:
        cls.turns.run(rank, lambda: run(cls, test, rank, ranks, **options))

    def barrier_in_turns(rank: int, store: Any, name: str, ranks: int, *limits: Any) -> None:
        if not has_turns():
            barrier(rank, store, name, ranks, *limits)
            return
        store.add(name, 1)
        _thread.wait(lambda: store.add(name, 0) >= ranks)

    case._spawn_threads, case._run = spawn_in_turns, classmethod(run_in_turns)
    groups._store_based_barrier = barrier_in_turns
