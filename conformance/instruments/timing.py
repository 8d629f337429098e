"""Duration of steps without the work of instruments, which is reported and not judged."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from conformance.instruments import accelerators
from reference_trainer.observer import Observer, Phase

_WIDTH, _PRODUCTS, _REPEATS = 64, 16, 3


def calibration_s(device: torch.device) -> float:
    """Return the least time of several runs of a fixed amount of work, in seconds: a unit for durations.

    The work is small products of matrices, as in the models of the matrix: a slow or busy machine slows it down as it
    slows down steps.
    """
    matrix = torch.ones(_WIDTH, _WIDTH, device=device)
    return min(_time_s(matrix) for _ in range(_REPEATS))


def _time_s(matrix: torch.Tensor) -> float:
    start_s = _now_s()
    for _ in range(_PRODUCTS):
        torch.mm(matrix, matrix)
    return _now_s() - start_s


def _now_s(clock: Callable[[], float] = time.perf_counter) -> float:
    """Point in time when all issued work has finished."""
    accelerators.synchronize()
    return clock()


class StepTimes(Observer):
    """Clock for steps: from when a step asks for its data until its optimizer is done, on the device too."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.step_s: list[float] = []
        self._clock = clock
        self._start_s = self._excluded_s = 0.0

    def phase(self, name: Phase, *, step: int) -> None:
        """Start the clock when a step begins, and read it when the step has ended."""
        if name == "data":
            self._start_s, self._excluded_s = _now_s(self._clock), 0.0
        elif name == "idle":
            self.step_s.append(_now_s(self._clock) - self._start_s - self._excluded_s)

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Open a context for uncounted work."""
        start_s = self._clock()
        try:
            yield
        finally:
            self._excluded_s += self._clock() - start_s
