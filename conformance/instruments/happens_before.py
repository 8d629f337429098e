"""Happens-before: unordered accesses to memory on different streams, found in a trace of issued operators.

Operators on one stream run in the order in which the host issued them. Across streams only events order: operators
issued before an event was recorded precede those issued after a stream, or the host, has waited for the event. Two
accesses of the same bytes, one of them a write, on different streams and without such a chain are a race: some timing
of the streams runs them the other way round, whether this run did or not.

Each stream has a vector clock: how far into every other stream its next operator is known to come after (Mattern,
"Virtual time and global states of distributed systems", 1989; Flanagan and Freund, "FastTrack", 2009).

Memory that is released is reused as early as any allocator may: a caching allocator hands it to the next request on the
stream that it was allocated on, without waiting for other streams
(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams). So the first access to the next allocation must
come after all accesses to the released storage. Sizes are not compared: releasing too early is a fault by itself.

An access of the host itself, such as reading pinned memory, is an operator of stream `HOST`: it follows everything that
the host has waited for, and precedes everything that the host issues next.

Nothing here imports torch: a trace is plain data, from a run on the CPU (`streams.py`) or from a device.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

HOST = -1
"""Number of the stream of the host's own accesses."""


class Access(NamedTuple):
    """Bytes of a storage that an operator reads or writes."""

    storage: int
    """Number of the storage: each has its own, also where an address is used again."""
    start: int
    """Offset of the first byte."""
    stop: int
    """Offset behind the last byte."""
    writes: bool


class Operation(NamedTuple):
    """Operator that was issued on a stream."""

    stream: int
    operator: str
    """Name of the operator, such as `aten::mm`."""
    accesses: Sequence[Access]
    site: Any = None
    """Call site of the operator, in any form; passed on unchanged."""


class Record(NamedTuple):
    """Event that was recorded on a stream; recorded again, it stands for the later point."""

    event: int
    stream: int


class Wait(NamedTuple):
    """Wait of a stream for an event; an event that was never recorded delays nothing."""

    event: int
    stream: int


class HostWait(NamedTuple):
    """Event that the host waited for, before it issued anything else."""

    event: int


class HostSynchronize(NamedTuple):
    """Stream whose operators the host waited for; None: all streams."""

    stream: int | None


class Allocation(NamedTuple):
    """Storage that was allocated on a stream."""

    storage: int
    stream: int


class Recorded(NamedTuple):
    """Stream that the allocator lets finish, once the storage is released, before it hands out the memory again.

    So does `Tensor.record_stream`.
    """

    storage: int
    stream: int


class Release(NamedTuple):
    """Storage that nothing refers to any longer."""

    storage: int


Entry = Operation | Record | Wait | HostWait | HostSynchronize | Allocation | Recorded | Release
"""Action of the host; a trace has its entries in the order of the host."""


class Race(NamedTuple):
    """Two operators on different streams that nothing orders, the first one issued first."""

    first: Operation
    second: Operation
    storage: int
    """Storage that both access, or that of the first, whose memory the second may reuse."""
    reused: bool
    """True if the storage was released in between, and the second operator's may be in the same memory."""


class _Use(NamedTuple):
    number: int
    """Number of the operator on its stream, from 1."""
    operation: Operation


class _Storage:
    """State of a storage: the stream it was allocated on, last uses, and released storages whose memory it may have."""

    def __init__(self, number: int, owner: int | None, former: "list[_Storage]") -> None:
        self.number, self.owner, self.former = number, owner, former
        self.uses: dict[tuple[int, int, int, bool], _Use] = {}
        """Last use by stream, start, stop, and whether it writes; order after it implies order after earlier uses."""
        self.recorded: set[int] = set()
        """Streams that the allocator lets finish before it hands out the memory again."""

    def uses_at_reuse(self) -> dict[tuple[int, int, int, bool], _Use]:
        """Return the uses for which an allocator does not wait."""
        return {key: use for key, use in self.uses.items() if key[0] not in self.recorded}


class _Checker:
    def __init__(self, trace: Sequence[Entry]) -> None:
        self._trace, self._shared = trace, _shared_storages(trace)
        self._clocks: dict[int, dict[int, int]] = {}
        """Vector clock by stream: the number of the last operator, of each stream, that the next one comes after."""
        self._host: dict[int, int] = {}
        self._events: dict[int, dict[int, int]] = {}
        self._storages: dict[int, _Storage] = {}
        self._released: dict[int, list[_Storage]] = {}
        """Storages whose memory the next allocation may have, by the stream that they were allocated on."""

    def races(self) -> Iterator[Race]:
        for entry in self._trace:
            match entry:
                case Operation():
                    yield from self._operation(entry)
                case Record(event, stream):
                    self._events[event] = dict(self._clock(stream))
                case Wait(event, stream):
                    _advance(self._clock(stream), self._events.get(event, {}))
                case HostWait(event):
                    self._host_knows(self._events.get(event, {}))
                case HostSynchronize(stream):
                    for clock in [*self._clocks.values()] if stream is None else [self._clock(stream)]:
                        self._host_knows(clock)
                case Allocation(storage, stream):
                    self._storages[storage] = _Storage(storage, stream, self._released.pop(stream, []))
                case Recorded(storage, stream):
                    if storage in self._storages:
                        self._storages[storage].recorded.add(stream)
                case Release(storage):
                    self._release(self._storages.pop(storage, None))

    def _clock(self, stream: int) -> dict[int, int]:
        if stream not in self._clocks:
            self._clocks[stream] = dict(self._host)
        return self._clocks[stream]

    def _host_knows(self, clock: dict[int, int]) -> None:
        """Order all work that the host issues from now on, on any stream, after this clock."""
        news = {stream: number for stream, number in clock.items() if self._host.get(stream, 0) < number}
        if not news:
            return
        self._host.update(news)
        for other in self._clocks.values():  # each has all that the host knew before
            _advance(other, news)

    def _operation(self, operation: Operation) -> Iterator[Race]:
        clock = self._clock(operation.stream)
        clock[operation.stream] = number = clock.get(operation.stream, 0) + 1
        for access in operation.accesses:
            storage = self._storages.get(access.storage)
            if storage is not None and storage.former:
                yield from _reused(storage, operation, clock)
            if access.storage in self._shared:
                storage = storage or self._storages.setdefault(access.storage, _Storage(access.storage, None, []))
                yield from _conflicts(storage, access, operation, clock)
                storage.uses[operation.stream, access.start, access.stop, access.writes] = _Use(number, operation)
        if operation.stream == HOST:
            self._host_knows(clock)

    def _release(self, storage: _Storage | None) -> None:
        """Return the memory to the allocator, also that of earlier storages there if nothing has used it since."""
        if storage is not None and storage.owner is not None:
            storage.uses = storage.uses_at_reuse()
            released = [*storage.former, *([storage] if storage.uses else [])]
            self._released.setdefault(storage.owner, []).extend(released)


def _conflicts(storage: _Storage, access: Access, operation: Operation, clock: Mapping[int, int]) -> Iterator[Race]:
    """Compare an access with the earlier ones to the same bytes."""
    for (stream, start, stop, writes), use in storage.uses.items():
        is_ordered = clock.get(stream, 0) >= use.number
        if not is_ordered and (writes or access.writes) and start < access.stop and access.start < stop:
            yield Race(use.operation, operation, storage.number, reused=False)


def _reused(storage: _Storage, operation: Operation, clock: Mapping[int, int]) -> Iterator[Race]:
    """Compare the first access to a storage with the accesses to those whose memory it may have."""
    former, storage.former = storage.former, []
    for released in former:
        for (stream, *_), use in released.uses.items():
            if clock.get(stream, 0) < use.number:
                yield Race(use.operation, operation, released.number, reused=True)


def _advance(clock: dict[int, int], other: Mapping[int, int]) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


def _shared_storages(trace: Sequence[Entry]) -> set[int]:
    """Return the storages that a second stream uses besides the one of their allocation or first use.

    Only these can be in a race. They are few: the selection saves most of the time of checking a trace.
    """
    stream_of: dict[int, int] = {}
    shared: set[int] = set()
    for entry in trace:
        match entry:
            case Allocation(storage, stream):
                stream_of[storage] = stream
            case Operation(stream, _, accesses):
                shared.update(a.storage for a in accesses if stream_of.setdefault(a.storage, stream) != stream)
    return shared


def unordered(trace: Sequence[Entry]) -> Iterator[Race]:
    """Yield the races in a trace, in the order of the second operator.

    Of several accesses of the same bytes by a stream only the last before the second operator counts.
    """
    yield from _Checker(trace).races()


def races(trace: Sequence[Entry]) -> list[Race]:
    """Return the first race of each kind in a trace, in the order of the second operator.

    A kind is two operators' names and streams, and whether memory was reused: a missing wait shows in each group of
    parameters, and in each of its tensors.
    """
    first: dict[tuple[Any, ...], Race] = {}
    for race in unordered(trace):
        kind = (race.first.operator, race.first.stream, race.second.operator, race.second.stream, race.reused)
        first.setdefault(kind, race)
    return list(first.values())
