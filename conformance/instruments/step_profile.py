"""A step under torch's profiler, for the time that communication takes. A fact: nothing is judged by it.

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
    """Looks at this step; None: at none."""

    def __init__(self, step: int | None) -> None:
        self._step = step
        self._profile: profile | None = None
        self._start_s = 0.0
        self.communication: Communication | None = None

    def begin(self, step: int) -> None:
        """Call it before anything of the step happens."""
        if step != self._step:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if _on_device() else [])]
        self._profile = profile(activities=activities)
        self._profile.start()
        self._start_s = time.perf_counter()

    def end(self, step: int) -> None:
        """Call it when all of the step has been issued."""
        if step != self._step or self._profile is None:
            return
        if _on_device():
            torch.cuda.synchronize()
        step_s = time.perf_counter() - self._start_s
        self._profile.stop()
        spans = read_trace(self._profile.export_chrome_trace)
        self._profile = None
        self.communication = communication(
            spans, step_s=step_s, thread=threading.get_native_id(), on_device=_on_device()
        )

    def excluded(self) -> AbstractContextManager[object]:
        """What happens inside is no part of the step."""
        return nullcontext() if self._profile is None else record_function(EXCLUDED)


def read_trace(export: Callable[[str], object]) -> list[Span]:
    """What a profiler writes when it is given a file."""
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "trace.json")
        export(str(trace))
        return msgspec.json.decode(trace.read_bytes(), type=_Trace).traceEvents


def _on_device() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # in ranks on devices, and nowhere else
