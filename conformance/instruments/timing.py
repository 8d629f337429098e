"""How long steps take, without what instruments do meanwhile. A fact: nothing is judged by it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from reference_trainer.observer import Observer, Phase

_WIDTH, _PRODUCTS, _REPEATS = 64, 16, 3


def calibration_s(device: torch.device) -> float:
    """Seconds that a fixed piece of work takes here and now, the fastest of some: what times are measured by.

    Small products of matrices, as in the models of the matrix: on a machine, or beside a load, that makes steps slower
    it becomes slower too.
    """
    matrix = torch.ones(_WIDTH, _WIDTH, device=device)
    return min(_time_s(matrix) for _ in range(_REPEATS))


def _time_s(matrix: torch.Tensor) -> float:
    start_s = _now_s()
    for _ in range(_PRODUCTS):
        torch.mm(matrix, matrix)
    return _now_s() - start_s


def _now_s(clock: Callable[[], float] = time.perf_counter) -> float:
    """When all that was issued so far is done."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # in a rank on a device, and nowhere else
        torch.cuda.synchronize()
    return clock()


class StepTimes(Observer):
    """From the moment when a step asks for its data until its optimizer is done, on the device too."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.step_s: list[float] = []
        self._clock = clock
        self._start_s = self._apart_s = 0.0

    def phase(self, name: Phase, *, step: int) -> None:
        if name == "data":
            self._start_s, self._apart_s = _now_s(self._clock), 0.0
        elif name == "idle":
            self.step_s.append(_now_s(self._clock) - self._start_s - self._apart_s)

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """What happens inside is not counted."""
        start_s = self._clock()
        try:
            yield
        finally:
            self._apart_s += self._clock() - start_s
