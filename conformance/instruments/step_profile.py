"""Profile of one step and its communication time, which is reported and not judged.

Not yet run on a device, see docs/gpu/status.md.
"""

import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from conformance.instruments.communication import EXCLUDED, Communication, Span, communication


class _Trace(msgspec.Struct):
    traceEvents: list[Span]  # noqa: N815 - the format's name


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


def read_trace(export: Callable[[str], object]) -> list[Span]:
    """Return the events of a trace that `export` writes to a file."""
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "trace.json")
        export(str(trace))
        return msgspec.json.decode(trace.read_bytes(), type=_Trace).traceEvents


def _on_device() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # in ranks on devices, and nowhere else
