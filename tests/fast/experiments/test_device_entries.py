"""Trace of the simulated device for the checker: storages instead of places in segments."""

from collections.abc import Sequence

import pytest

from conformance.experiments.device_entries import entries_of
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
    races,
)
from conformance.sim.trace import Access as Noted
from conformance.sim.trace import Bytes

COMPUTE, COPY = 0, 1
SEGMENT, PINNED = 1, -1
FIRST, SECOND = (SEGMENT, 0, 512), (SEGMENT, 512, 1024)


def noted(
    kind: str, stream: int = COMPUTE, *, event: int = 0, reads: Bytes | None = None, writes: Bytes | None = None
) -> Noted:
    return Noted(kind, stream, kind, event, (reads,) if reads else (), (writes,) if writes else ())


def entries(trace: Sequence[Noted], *, first: int = 0) -> list[Entry]:
    return entries_of(trace, first=first, site=lambda position: None)


@pytest.mark.parametrize(
    ("note", "entry"),
    [
        (noted("record", COPY, event=3), Record(3, COPY)),
        (noted("wait", COPY, event=3), Wait(3, COPY)),
        (noted("host_wait_event", COPY, event=3), HostWait(3)),
        (noted("host_wait_stream", COPY), HostSynchronize(COPY)),
    ],
)
def test_events_and_waits(note: Noted, entry: Entry) -> None:
    assert entries([note]) == [entry]


def test_each_allocation_is_a_storage_of_its_own() -> None:
    """Bytes of a segment are another storage when they are handed out again."""
    trace = [noted("alloc", writes=FIRST), noted("op", reads=(SEGMENT, 4, 8)), noted("free", writes=FIRST)]
    first, second = Access(1, 4, 8, writes=False), Access(2, 4, 8, writes=False)
    assert entries([*trace, *trace]) == [
        *(Allocation(1, COMPUTE), Operation(COMPUTE, "op", [first]), Release(1)),
        *(Allocation(2, COMPUTE), Operation(COMPUTE, "op", [second]), Release(2)),
    ]


def test_memory_that_waits_for_streams_is_released_at_once_but_for_them() -> None:
    later = [noted("free_later", writes=FIRST), noted("free", writes=FIRST)]
    trace = [noted("alloc", writes=FIRST), noted("record_stream", COPY, writes=FIRST), *later]
    assert entries(trace) == [Allocation(1, COMPUTE), Recorded(1, COPY), Release(1)]


def test_what_was_allocated_before_the_step_is_known_and_its_uses_are_not() -> None:
    before = [noted("alloc", writes=FIRST), noted("op", writes=FIRST), noted("alloc", COPY, writes=SECOND)]
    assert entries([*before, noted("free", writes=SECOND)], first=3) == [
        Allocation(1, COMPUTE),
        Allocation(2, COPY),
        Release(2),
    ]


def test_memory_from_before_the_trace_is_one_storage_for_each_block() -> None:
    trace = [noted("op", reads=FIRST), noted("op", reads=(PINNED, 0, 8)), noted("op", writes=SECOND)]
    storages = [entry.accesses[0].storage for entry in entries(trace) if isinstance(entry, Operation)]
    assert storages[0] == storages[2] != storages[1]
    assert max(storages) < 0


def test_the_host_must_wait_before_it_reads_what_a_stream_copies_to_pinned_memory() -> None:
    copy, read = noted("op", COPY, writes=(PINNED, 0, 8)), noted("host", HOST, reads=(PINNED, 0, 8))
    assert [(race.first.stream, race.second.stream) for race in races(entries([copy, read]))] == [(COPY, HOST)]
    assert races(entries([copy, noted("host_wait_stream", COPY), read])) == []


@pytest.mark.parametrize("kind", ["host_wait_read", "host_wait_device"])
def test_waits_of_those_who_look_order_nothing(kind: str) -> None:
    write, read = noted("op", COPY, writes=FIRST), noted("op", COMPUTE, reads=FIRST)
    assert len(races(entries([write, noted(kind, COPY), read]))) == 1


def test_pinned_memory_is_handed_out_when_no_stream_uses_it() -> None:
    copy, write = noted("op", COPY, reads=(PINNED, 0, 8)), noted("host", HOST, writes=(PINNED, 0, 8))
    allocation = noted("alloc_pinned", writes=(PINNED, 0, 512))
    assert len(races(entries([allocation, copy, write]))) == 1
    assert races(entries([allocation, copy, allocation, write])) == []


def test_an_operator_that_touches_no_memory_is_left_out() -> None:
    assert entries([noted("op")]) == []
