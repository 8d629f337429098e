"""Times of steps, which are reported and not judged: durations without the work of instruments, and a step's profile.

The profile has not yet been run on a device, see docs/gpu.md.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from conformance.instruments import accelerators
from conformance.instruments.communication import EXCLUDED, Communication, communication
from conformance.instruments.profiler_trace import read_trace
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


class StepProfile:
    """Profiler of one step, or of none if `step` is None."""

    def __init__(self, step: int | None) -> None:
        self.communication: Communication | None = None
        """Communication of the step, when the step has ended."""
        self._step = step
        self._profile: profile | None = None
        self._start_s = 0.0

    def begin(self, step: int) -> None:
        """Start the profiler if this is its step. Call it before anything of the step happens."""
        if step != self._step:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if _on_device() else [])]
        self._profile = profile(activities=activities)
        self._profile.start()
        self._start_s = time.perf_counter()

    def end(self, step: int) -> None:
        """Stop the profiler if this is its step. Call it when all of the step has been issued."""
        if step != self._step or self._profile is None:
            return
        if _on_device():
            torch.cuda.synchronize()
        step_s = time.perf_counter() - self._start_s
        self._profile.stop()
        spans = read_trace(self._profile.export_chrome_trace)
        self._profile = None
        thread = threading.get_native_id()
        self.communication = communication(spans, step_s=step_s, thread=thread, on_device=_on_device())

    def excluded(self) -> AbstractContextManager[object]:
        """Return the context for work that does not belong to the step."""
        return nullcontext() if self._profile is None else record_function(EXCLUDED)


def _on_device() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # in ranks on devices, and nowhere else
