"""Memory ledger: every allocation and release of torch's allocators, as the profiler reports them.

Public throughout: `torch.profiler` with `profile_memory`, exported as a trace, whose `[memory]` events hold address,
bytes and device. What is not torch's own is not seen: NumPy's arrays, gloo's buffers.
"""

import gc
import json
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

_CPU = 0
"""`Device Type` of an event, as `c10::DeviceType` numbers them."""


@dataclass
class MemoryLedger:
    """Bytes that were allocated while the ledger was open; what was there before does not count."""

    peak_bytes: int = 0
    """The most that was held at once."""
    kept_bytes: int = 0
    """What was still held when the ledger was closed."""

    def add_up(self, reports: Iterable[tuple[int, int]], *, mapped_bytes: Collection[int]) -> None:
        """Address and change in bytes of each allocation and release, in the order in which they happened.

        torch reports a file that it maps as an allocation of its size, but its pages are the page cache's: what is as
        large as one of `mapped_bytes` is left out.
        """
        live: dict[int, int] = {}
        for address, change in reports:
            if change > 0 and change not in mapped_bytes:
                live[address] = change
                self.kept_bytes += change
                self.peak_bytes = max(self.peak_bytes, self.kept_bytes)
            elif change < 0:
                self.kept_bytes -= live.pop(address, 0)


@contextmanager
def memory_ledger(*, mapped_bytes: Collection[int] = ()) -> Iterator[MemoryLedger]:
    """Listens to this thread's allocations on the CPU; the figures are there when the context has ended.

    Raises RuntimeError if torch reports none at all.
    """
    ledger = MemoryLedger()
    gc.collect()  # so that garbage in cycles is not released into the ledger
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        yield ledger
    reports = [event for event in _trace(profiler) if event["args"]["Device Type"] == _CPU]
    if not reports:
        raise RuntimeError("the profiler has reported no allocation: this torch cannot be asked for its memory")
    in_order = sorted(reports, key=lambda event: event["ts"])
    ledger.add_up(((event["args"]["Addr"], event["args"]["Bytes"]) for event in in_order), mapped_bytes=mapped_bytes)


def _trace(profiler: Any) -> list[dict[str, Any]]:
    """The events of allocators."""
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_bytes())["traceEvents"]
    return [event for event in events if event.get("name") == "[memory]"]
