"""Functions that run in turns and meet: each thread stands for a rank, and one of them computes at a time."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Barrier, BrokenBarrierError, Lock
from typing import Generic, TypeVar

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


class Lockstep(Generic[Given]):
    """Meetings of as many functions as there are members, in each of which all give something and get something."""

    def __init__(self, members: int, exchange: Callable[[Sequence[Given]], Sequence[Given]]) -> None:
        """`exchange` computes the values that the members get at a meeting from the values that they have given."""
        self._exchange = exchange
        self._given: list[Given | None] = [None] * members
        self._got: Sequence[Given] = ()
        self._turn, self._barrier = Lock(), Barrier(members)

    def run(self, functions: Sequence[Callable[[], Result]]) -> list[Result]:
        """Return the results of functions, one of each member; raises the error of the first that raises one."""
        with ThreadPoolExecutor(len(functions)) as threads:
            futures = [threads.submit(self._take_turns, function) for function in functions]
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def meet(self, member: int, given: Given) -> Given:
        """Return the value that a member gets at its next meeting; called by its function."""
        self._given[member] = given
        self._turn.release()
        try:
            if self._barrier.wait() == 0:
                with self._turn:
                    self._got = self._exchange([each for each in self._given if each is not None])
            self._barrier.wait()
        finally:
            self._turn.acquire()
        return self._got[member]

    def _take_turns(self, function: Callable[[], Result]) -> Result:
        with self._turn, ExitStack() as stack:
            for context in _shared:
                stack.enter_context(context)
            try:
                return function()
            except BaseException:
                self._barrier.abort()
                raise
