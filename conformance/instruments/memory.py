"""Memory ledger: every allocation and release of torch's allocators, as the profiler reports them.

Public throughout: `torch.profiler` with `profile_memory`, exported as a trace, whose `[memory]` events hold address,
bytes and device, in the order in which they happened, of all threads that work for this one. Memory outside of torch's
allocators is not seen: NumPy's arrays, gloo's buffers.

Memory that a process group allocates while it communicates (copies of inputs and outputs) has an account of its own. It
is allocated inside of an operator of c10d, or by another thread, and often released by such a thread out of the
profiler's sight.
"""

import gc
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import msgspec
from torch.profiler import ProfilerActivity, profile, record_function

from conformance.instruments.profiler_trace import MEMORY, Span, read_trace
from conformance.memory_segment import MemorySegment
from reference_trainer.observer import Observer, Phase

_CPU = 0
"""Type of the device of an event, as `c10::DeviceType` numbers them."""
MARK = "memory mark: "
"""Prefix of a mark's name in the trace."""
_C10D = "c10d::"
_ACTIVITIES = [ProfilerActivity.CPU]


class BackendUse(msgspec.Struct):
    """Memory that a process group allocated for one operator of c10d."""

    operator: str
    """Name of the operator, such as `c10d::_allgather_base_`."""
    peak_bytes: int
    """Peak of the bytes held for the operator, by the releases that were seen."""


Report = tuple[int, int] | tuple[int, int, str] | str
"""Allocation or release as (address, change in bytes), with the operator as third item if it was c10d's; or a mark."""


@dataclass
class MemoryLedger:
    """Bytes that were allocated while the ledger was open; earlier allocations do not count."""

    peak_bytes: int = 0
    """Peak of the bytes held."""
    kept_bytes: int = 0
    """Bytes that were still held when the ledger was closed."""
    segments: list[MemorySegment] = field(default_factory=list)
    """Segments from each mark to the next; the first begins with the ledger, without a name."""
    backend: list[BackendUse] = field(default_factory=list)
    """Memory of process groups in the order of the operators; those that allocate nothing are left out."""

    def add_up(self, reports: Iterable[Report], *, mapped_bytes: Collection[int]) -> None:
        """Fill the ledger from reports in the order in which the reported allocations, releases and marks happened.

        torch reports a file that it maps as an allocation of the file's size, but the pages are the page cache's: an
        allocation as large as one of `mapped_bytes` is left out.
        """
        live = _Blocks()
        backend = _Backend(self.backend)
        segment = MemorySegment("", 0, 0, 0)
        self.segments = [segment]
        for report in reports:
            match report:
                case str():
                    segment = MemorySegment(report, self.kept_bytes, self.kept_bytes, self.kept_bytes)
                    self.segments.append(segment)
                    continue
                case (address, change, operator):
                    backend.add(address, change, operator)
                    self.kept_bytes -= live.remove(address) if change < 0 else live.overlapped(address, change)
                    continue
                case (address, change):
                    pass
            if change > 0 and change not in mapped_bytes:
                self.kept_bytes += change - live.add(address, change)
            elif change < 0:
                self.kept_bytes -= live.remove(address)
            segment.peak_bytes = max(segment.peak_bytes, self.kept_bytes)
            segment.end_bytes = self.kept_bytes
        self.peak_bytes = max(segment.peak_bytes for segment in self.segments)


class _Blocks:
    """Blocks of memory that are held. A block under a new block has been released, by a thread that is not seen."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._sizes: dict[int, int] = {}

    def add(self, address: int, size: int) -> int:
        """Add a block; returns the bytes that must have been released before."""
        released = self.overlapped(address, size)
        insort(self._addresses, address)
        self._sizes[address] = size
        return released

    def remove(self, address: int) -> int:
        """Remove a block; returns its size, or 0 if it is not held."""
        if address not in self._sizes:
            return 0
        del self._addresses[bisect_left(self._addresses, address)]
        return self._sizes.pop(address)

    def overlapped(self, address: int, size: int) -> int:
        """Remove all blocks that overlap a range of addresses; returns their total size."""
        first = bisect_left(self._addresses, address)
        while first and self._addresses[first - 1] + self._sizes[self._addresses[first - 1]] > address:
            first -= 1
        last = bisect_left(self._addresses, address + size)
        return sum(self.remove(overlapping) for overlapping in self._addresses[first:last])


class _Backend:
    """Accounts of each operator: memory whose release by earlier operators was not seen is not counted again."""

    def __init__(self, uses: list[BackendUse]) -> None:
        self._uses, self._operator = uses, ""
        self._live: dict[int, int] = {}

    def add(self, address: int, change: int, operator: str) -> None:
        if operator != self._operator:
            self._operator, self._live = operator, {}
            self._uses.append(BackendUse(operator.partition("#")[0], 0))
        if change > 0:
            self._live[address] = change
        else:
            self._live.pop(address, None)
        self._uses[-1].peak_bytes = max(self._uses[-1].peak_bytes, sum(self._live.values()))


_listeners: list[Callable[[str], None]] = []
_profilers: list[profile] = []
"""Profilers of the ledgers that are open."""


def mark(name: str) -> None:
    """Begin a new segment in all open ledgers."""
    with record_function(MARK + name):
        pass
    for listener in _listeners:
        listener(name)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Open a context in which `listener` is called with the name of each mark."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def allocations_alone() -> Iterator[None]:
    """Open a context in which open ledgers of the CPU see allocations and releases, but neither operators nor marks.

    For steps between measured ones: to write and read the operators of fifty steps takes longer than the steps. Memory
    of process groups counts as this process's own there, so that their threads must not release any of it.
    https://docs.pytorch.org/docs/stable/profiler.html#torch.profiler._KinetoProfile.toggle_collection_dynamic
    """
    for profiler in _profilers:
        profiler.toggle_collection_dynamic(False, _ACTIVITIES)
    try:
        yield
    finally:
        for profiler in _profilers:
            profiler.toggle_collection_dynamic(True, _ACTIVITIES)


class PhaseMarks(Observer):
    """Marks of the phases of training, under their names."""

    def phase(self, name: Phase, *, step: int) -> None:
        """Begin the segment of a phase."""
        mark(name)


Ledger = Callable[[], AbstractContextManager[MemoryLedger]]
"""Function that opens a ledger, whose metrics are there when the context has ended."""


@contextmanager
def memory_ledger(*, mapped_bytes: Collection[int] = ()) -> Iterator[MemoryLedger]:
    """Open a ledger of allocations on the CPU; its metrics are there when the context has ended.

    `mapped_bytes` are the sizes of mapped files, see `MemoryLedger.add_up`. Raises RuntimeError if torch reports no
    allocation at all.
    """
    ledger = MemoryLedger()
    gc.collect()  # so that garbage in cycles is not released into the ledger
    with profile(activities=_ACTIVITIES, profile_memory=True) as profiler:
        _profilers.append(profiler)
        try:
            yield ledger
        finally:
            _profilers.remove(profiler)
    events = sorted(_trace(profiler), key=lambda event: event.ts)
    if not any(event.name == MEMORY for event in events):
        raise RuntimeError("the profiler has reported no allocation: this torch cannot be asked for its memory")
    ledger.add_up(_reports(events, thread=threading.get_native_id()), mapped_bytes=mapped_bytes)


def _reports(events: list[Span], *, thread: int) -> Iterator[Report]:
    """Reports of a trace; memory of another thread, or inside of an operator of c10d, belongs to the last operator."""
    operator, until = "", 0.0
    for number, event in enumerate(events):
        if event.name == MEMORY:
            own = event.tid == thread and event.ts > until
            change = event.args.address, event.args.change_bytes
            yield change if own else (*change, operator)
        elif event.name.startswith(MARK):
            yield event.name.removeprefix(MARK)
        else:
            operator, until = f"{event.name}#{number}", event.ts + event.dur


def _trace(profiler: profile) -> list[Span]:
    """Events of the CPU's allocator, operators of c10d, and marks."""
    return [event for event in read_trace(profiler.export_chrome_trace) if _is_span(event) or _is_report(event)]


def _is_span(event: Span) -> bool:
    return event.ph == "X" and event.name.startswith((MARK, _C10D))


def _is_report(event: Span) -> bool:
    return event.name == MEMORY and event.args.device_type == _CPU
