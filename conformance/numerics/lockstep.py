"""Functions that run in turns and meet: each thread stands for a rank, and one of them computes at a time."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Barrier, BrokenBarrierError, Lock
from typing import Any, TypeVar

Given = TypeVar("Given")
Result = TypeVar("Result")
_shared: list[AbstractContextManager[object]] = []


@contextmanager
def shared(context: AbstractContextManager[object]) -> Iterator[None]:
    """Enter a context that holds for one thread, such as a dispatch mode, also in functions that then run in lockstep.

    It must be possible to enter it several times.
    """
    _shared.append(context)
    try:
        with context:
            yield
    finally:
        _shared.remove(context)


class Lockstep:
    """Meetings of as many functions as there are members, in each of which all give something and get something."""

    def __init__(self, members: int) -> None:
        self._given: list[Any] = [None] * members
        self._got: Sequence[Any] = ()
        self._turn, self._barrier = Lock(), Barrier(members)

    def run(self, functions: Sequence[Callable[[], Result]]) -> list[Result]:
        """Return the results of functions, one of each member; raises the error of the first that raises one."""
        with ThreadPoolExecutor(len(functions)) as threads:
            futures = [threads.submit(self._take_turns, function) for function in functions]
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def meet(self, member: int, given: Given, exchange: Callable[[Sequence[Given]], Sequence[Result]]) -> Result:
        """Return the value that a member gets at its next meeting; called by its function.

        `exchange`, the same for all members, computes what they get from what they have given.
        """
        self._given[member] = given
        self._turn.release()
        try:
            if self._barrier.wait() == 0:
                with self._turn:
                    self._got = exchange(self._given)
            self._barrier.wait()
        finally:
            self._turn.acquire()
        got: Result = self._got[member]
        return got

    def _take_turns(self, function: Callable[[], Result]) -> Result:
        with self._turn, ExitStack() as stack:
            for context in _shared:
                stack.enter_context(context)
            try:
                return function()
            except BaseException:
                self._barrier.abort()
                raise
