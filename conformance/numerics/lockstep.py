"""Functions that run in turns and meet: each thread stands for a rank, and one of them computes at a time."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from threading import Barrier, BrokenBarrierError, Lock
from typing import Generic, TypeVar

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Given = TypeVar("Given")
Result = TypeVar("Result")


class Lockstep(Generic[Given]):
    """Meetings of as many functions as there are members, in each of which all give something and get something."""

    def __init__(self, members: int, exchange: Callable[[Sequence[Given]], Sequence[Given]]) -> None:
        """`exchange` computes what the members get at a meeting, from what they have given."""
        self._exchange = exchange
        self._given: list[Given | None] = [None] * members
        self._got: Sequence[Given] = ()
        self._turn, self._barrier = Lock(), Barrier(members)

    def run(self, functions: Sequence[Callable[[], Result]]) -> list[Result]:
        """Return the results of functions, one of each member; raises what the first of them raises.

        Dispatch modes of the calling thread are those of all, such as an instrument that sees operators.
        """
        modes = _get_current_dispatch_mode_stack()
        with ThreadPoolExecutor(len(functions)) as threads:
            futures = [threads.submit(self._take_turns, function, modes) for function in functions]
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def meet(self, member: int, given: Given) -> Given:
        """Return what a member gets at its next meeting; called by its function."""
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

    def _take_turns(self, function: Callable[[], Result], modes: Sequence[AbstractContextManager[object]]) -> Result:
        with self._turn, ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            try:
                return function()
            except BaseException:
                self._barrier.abort()
                raise
