"""How long steps take, without what instruments do meanwhile. A fact: nothing is judged by it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from reference_trainer.observer import Observer, Phase


class StepTimes(Observer):
    """From the moment when a step asks for its data until its optimizer is done, on the device too."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.step_s: list[float] = []
        self._clock = clock
        self._start_s = self._apart_s = 0.0

    def phase(self, name: Phase, *, step: int) -> None:
        if name == "data":
            self._start_s, self._apart_s = self._now_s(), 0.0
        elif name == "idle":
            self.step_s.append(self._now_s() - self._start_s - self._apart_s)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What happens inside is not counted."""
        start_s = self._clock()
        try:
            yield
        finally:
            self._apart_s += self._clock() - start_s

    def _now_s(self) -> float:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # in a rank on a device, and nowhere else
            torch.cuda.synchronize()
        return self._clock()
