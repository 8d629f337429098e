"""Entries of the checker of happens-before for a trace of the simulated device. Nothing here imports torch."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from conformance.instruments.happens_before import (
    HOST,
    Access,
    Allocation,
    Entry,
    HostSynchronize,
    HostWait,
    Operation,
    Record,
    Recorded,
    Release,
    Wait,
)
from conformance.sim.trace import Access as Noted
from conformance.sim.trace import Bytes


@dataclass
class _Block:
    """Storages in a block that are allocated at a point of the trace."""

    begins: list[int] = field(default_factory=list)
    """First byte of each, ascending."""
    storages: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """End, storage and stream by first byte."""


@dataclass
class _Memory:
    """Allocated memory: which storage the bytes of a block belong to at a point of the trace."""

    blocks: dict[int, _Block] = field(default_factory=dict)
    count: int = 0

    def allocate(self, at: Bytes, stream: int) -> int:
        """Return the number of a new storage."""
        number, begin, end = at
        self.count += 1
        block = self.blocks.setdefault(number, _Block())
        if begin not in block.storages:
            block.begins.insert(bisect_left(block.begins, begin), begin)
        block.storages[begin] = (end, self.count, stream)
        return self.count

    def release(self, at: Bytes) -> int | None:
        """Return the number of a storage that is no longer allocated; None for one that was allocated before all."""
        number, begin, _ = at
        block = self.blocks.get(number)
        if block is None or begin not in block.storages:
            return None
        del block.begins[bisect_left(block.begins, begin)]
        return block.storages.pop(begin)[1]

    def storage_of(self, at: Bytes) -> int:
        """Return the number of the storage of bytes, a negative one for a block that was allocated before the trace."""
        number, begin, _ = at
        if block := self.blocks.get(number):
            index = bisect_right(block.begins, begin)
            if index:
                end, storage, _ = block.storages[block.begins[index - 1]]
                if begin < end:
                    return storage
        return -1 - 2 * abs(number) - (number < 0)


def entries_of(
    noted: Sequence[Noted], *, first: int, site: Callable[[int], Any], reads_order: bool = False
) -> list[Entry]:
    """Return the checker's entries for a device's trace, from position `first` on.

    `site` returns where the entry at a position was issued. With `reads_order` the host's waits for a number, for a
    copy to pageable memory and for all streams order its later work, as they do on a device. Without, they order
    nothing: loops wait so to log a loss or to take the time of a step, and instruments to see a tensor, and a run must
    be free of races without them, too. The trace on the CPU has no such waits either.
    """
    memory = _Memory()
    for each in noted[:first]:
        _follow(memory, each, reads_order)
    entries: list[Entry] = [
        Allocation(storage, stream)
        for number, block in memory.blocks.items()
        for _, storage, stream in block.storages.values()
        if number > 0
    ]
    for position, each in enumerate(noted[first:], first):
        if each.kind in ("op", "host"):
            entry: Entry | None = _operation(memory, each, site(position))
        else:
            entry = _follow(memory, each, reads_order)
        if entry is not None:
            entries.append(entry)
    return entries


def _operation(memory: _Memory, noted: Noted, site: Any) -> Operation | None:
    accesses = [
        Access(memory.storage_of(at), at[1], at[2], writes)
        for ranges, writes in ((noted.reads, False), (noted.writes, True))
        for at in ranges
    ]
    return Operation(noted.stream, noted.name, accesses, site) if accesses else None


def _follow(memory: _Memory, noted: Noted, reads_order: bool) -> Entry | None:
    """Return the entry for events, waits and the allocator, whose blocks `memory` follows.

    Memory that waits for streams is released at once, but for their uses: when the memory is free, it may be reused as
    early as any allocator may. Pinned memory is handed out when no stream uses it any longer.
    """
    match noted.kind:
        case "record":
            return Record(noted.event, noted.stream)
        case "wait":
            return Wait(noted.event, noted.stream)
        case "host_wait_event":
            return HostWait(noted.event)
        case "host_wait_stream":
            return HostSynchronize(noted.stream)
        case "host_wait_read" | "host_wait_device" if reads_order:
            return HostSynchronize(noted.stream)
        case "alloc":
            return Allocation(memory.allocate(noted.writes[0], noted.stream), noted.stream)
        case "alloc_pinned":
            memory.allocate(noted.writes[0], HOST)
        case "record_stream":
            return Recorded(memory.storage_of((noted.writes or noted.reads)[0]), noted.stream)
        case "free_later" | "free":
            released = memory.release((noted.writes or noted.reads)[0])
            return None if released is None else Release(released)
    return None
