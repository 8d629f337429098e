"""Memory of a device by segments, from the caching allocator's public statistics.

Not yet run on a CUDA device, see docs/gpu.md.

`requested_bytes` counts the bytes that torch asked for: the allocator rounds a request up to 512 bytes and more, and
reserves whole segments of the device (`reserved`); NVML reports the memory of all processes. The host counts when it
allocates and frees, so that there is nothing to wait for.
https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html
"""

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from conformance.instruments import accelerators
from conformance.instruments.memory import MemoryLedger, listening, memory_ledger
from conformance.memory_segment import MemorySegment

Statistics = Callable[[], Mapping[str, int]]
"""Function that returns the allocator's statistics under the names of `torch.cuda.memory_stats`."""
_KINDS = ("requested", "allocated", "active", "reserved")


def expandable_segments(
    device: torch.device, *, snapshot: Callable[[], Sequence[Mapping[str, object]]] = torch.cuda.memory_snapshot
) -> bool | None:
    """Return whether the allocator of a device has segments that grow, None for other devices than CUDA's.

    https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_snapshot.html
    """
    if device.type != "cuda":
        return None
    return any(segment["is_expandable"] for segment in snapshot())


def ledger_of(device: torch.device, *, mapped_bytes: Collection[int] = ()) -> AbstractContextManager[MemoryLedger]:
    """Return the ledger for the memory of a device, or of the host if `device` is the CPU.

    `mapped_bytes` is for the host: sizes of mapped files, see `MemoryLedger.add_up`.
    """
    if device.type == "cpu":
        return memory_ledger(mapped_bytes=mapped_bytes)
    return device_ledger(lambda: accelerators.statistics(device), reset=lambda: accelerators.reset_peaks(device))


@contextmanager
def device_ledger(statistics: Statistics, *, reset: Callable[[], None]) -> Iterator[MemoryLedger]:
    """Open a ledger for a device; its metrics are there when the context has ended.

    `reset` makes the present values of the statistics their peaks.
    """
    gc.collect()
    before = statistics()["requested_bytes.all.current"]
    ledger = MemoryLedger()
    reset()

    def end_segment() -> None:
        now, segment = statistics(), ledger.segments[-1]
        segment.end_bytes = now["requested_bytes.all.current"] - before
        peaks = {kind: now[f"{kind}_bytes.all.peak"] for kind in _KINDS}
        segment.peak_bytes = peaks.pop("requested") - before
        for kind, value in peaks.items():
            setattr(segment, f"{kind}_bytes", value)

    def begin_segment(name: str) -> None:
        end_segment()
        held = ledger.segments[-1].end_bytes
        ledger.segments.append(MemorySegment(name, held, held, held))
        reset()

    ledger.segments = [MemorySegment("", 0, 0, 0)]
    with listening(begin_segment):
        yield ledger
    end_segment()
    ledger.kept_bytes = ledger.segments[-1].end_bytes
    ledger.peak_bytes = max(segment.peak_bytes for segment in ledger.segments)
