"""Happens-before: which pairs of accesses a trace leaves unordered, entry by entry."""

import random
from collections.abc import Sequence

import pytest

from conformance.instruments.happens_before import (
    HOST,
    Access,
    Allocation,
    Entry,
    HostSynchronize,
    HostWait,
    Operation,
    Race,
    Record,
    Recorded,
    Release,
    Wait,
    races,
)

COMPUTE, COPY, REDUCE = 0, 1, 2
TENSOR, OTHER = 10, 11
EVENT = 20


def reads(stream: int, storage: int = TENSOR, *, start: int = 0, stop: int = 64, operator: str = "read") -> Operation:
    return Operation(stream, operator, [Access(storage, start, stop, writes=False)])


def writes(stream: int, storage: int = TENSOR, *, start: int = 0, stop: int = 64, operator: str = "write") -> Operation:
    return Operation(stream, operator, [Access(storage, start, stop, writes=True)])


def pairs(trace: Sequence[Entry]) -> list[tuple[str, int, str, int, bool]]:
    return [(r.first.operator, r.first.stream, r.second.operator, r.second.stream, r.reused) for r in races(trace)]


RACE = [("write", COPY, "read", COMPUTE, False)]


@pytest.mark.parametrize(
    ("first", "second"),
    [(writes(COPY), reads(COMPUTE)), (reads(COPY), writes(COMPUTE)), (writes(COPY), writes(COMPUTE))],
)
def test_accesses_of_two_streams_race_if_one_writes(first: Operation, second: Operation) -> None:
    assert races([first, second]) == [Race(first, second, TENSOR, reused=False)]


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param([reads(COPY), reads(COMPUTE)], id="both read"),
        pytest.param([writes(COPY, stop=32), reads(COMPUTE, start=32)], id="other bytes"),
        pytest.param([writes(COPY), Record(EVENT, COPY), Wait(EVENT, COMPUTE), reads(COMPUTE)], id="event"),
        pytest.param([writes(COPY), Record(EVENT, COPY), HostWait(EVENT), reads(COMPUTE)], id="host waits for event"),
        pytest.param([writes(COPY), HostSynchronize(None), reads(COMPUTE)], id="host waits for all"),
        pytest.param([writes(COPY), HostSynchronize(COPY), reads(HOST)], id="the host has waited"),
        pytest.param([writes(HOST), reads(COPY)], id="the host wrote before it issued"),
    ],
)
def test_ordered_accesses(trace: list[Entry]) -> None:
    assert races(trace) == []


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param([writes(COPY, stop=33), reads(COMPUTE, start=32)], id="overlap by a byte"),
        pytest.param([writes(COPY), Record(EVENT, COPY), reads(COMPUTE)], id="no wait"),
        pytest.param([Record(EVENT, COPY), writes(COPY), Wait(EVENT, COMPUTE), reads(COMPUTE)], id="recorded before"),
        pytest.param([writes(COPY), HostSynchronize(COMPUTE), reads(COMPUTE)], id="host waits for another stream"),
        pytest.param([writes(COPY), writes(COPY, stop=8, operator="small"), reads(COMPUTE, start=16)], id="earlier"),
    ],
)
def test_unordered_accesses(trace: list[Entry]) -> None:
    assert pairs(trace) == RACE


def test_a_wait_is_for_the_event_as_it_was_recorded_then() -> None:
    again: list[Entry] = [writes(COPY), Record(EVENT, COPY), Wait(EVENT, COMPUTE), writes(COPY), Record(EVENT, COPY)]
    assert pairs([*again, reads(COMPUTE)]) == RACE
    assert races([*again, Wait(EVENT, COMPUTE), reads(COMPUTE)]) == []


def test_a_kind_of_pair_is_reported_once() -> None:
    trace = [writes(COPY), writes(COPY, OTHER), reads(COMPUTE), reads(COMPUTE, OTHER), reads(REDUCE)]
    assert pairs(trace) == [*RACE, ("write", COPY, "read", REDUCE, False)]
    assert [race.storage for race in races(trace)] == [TENSOR, TENSOR]


REUSED: list[Entry] = [
    Allocation(TENSOR, COMPUTE),
    writes(COMPUTE),
    Record(EVENT, COMPUTE),
    Wait(EVENT, REDUCE),
    reads(REDUCE),
]
"""Memory of the compute stream, used by another stream, which has waited for it."""
NEXT: list[Entry] = [Allocation(OTHER, COMPUTE), writes(COMPUTE, OTHER, operator="next")]


def test_memory_released_while_another_stream_uses_it_is_a_race() -> None:
    assert pairs([*REUSED, Release(TENSOR), *NEXT]) == [("read", REDUCE, "next", COMPUTE, True)]
    assert races([*REUSED, *NEXT, Release(TENSOR)]) == [], "kept until the other memory was allocated"


@pytest.mark.parametrize("early", [True, False])
def test_a_wait_before_the_next_use_of_the_memory_suffices(early: bool) -> None:
    wait: list[Entry] = [Record(EVENT + 1, REDUCE), Wait(EVENT + 1, COMPUTE)]
    released: list[Entry] = [Release(TENSOR)]
    assert races([*REUSED, *(wait + released if early else released + wait), *NEXT]) == []


def test_the_allocator_hands_memory_to_its_own_stream_alone() -> None:
    on_another: list[Entry] = [Allocation(OTHER, COPY), writes(COPY, OTHER)]
    assert races([*REUSED, Release(TENSOR), *on_another]) == []


def test_memory_that_was_never_used_is_handed_on() -> None:
    unused: list[Entry] = [Allocation(12, COMPUTE), Release(12)]
    assert pairs([*REUSED, Release(TENSOR), *unused, *NEXT]) == [("read", REDUCE, "next", COMPUTE, True)]


def test_memory_that_was_there_before_the_trace_is_not_handed_out() -> None:
    assert races([*REUSED[1:], Release(TENSOR), *NEXT]) == []


def _by_definition(trace: Sequence[Entry]) -> set[tuple[int, int]]:
    """Return the positions of all races between accesses, by a search for paths through the trace."""
    after: dict[int, set[int]] = {}  # by position: those of the entries before it in the order
    last: dict[int, set[int]] = {}
    events: dict[int, set[int]] = {}
    host: set[int] = set()
    for position, entry in enumerate(trace):
        match entry:
            case Operation(stream) if stream == HOST:
                after[position] = set(host)
                host |= {position}
            case Operation(stream):
                after[position] = last.get(stream, set()) | host
                last[stream] = after[position] | {position}
            case Record(event, stream):
                events[event] = last.get(stream, set()) | host
            case Wait(event, stream):
                last[stream] = last.get(stream, set()) | events.get(event, set())
            case HostWait(event):
                host |= events.get(event, set())
            case HostSynchronize(stream):
                host |= set().union(*last.values()) if stream is None else last.get(stream, set())
    operations = {position: entry for position, entry in enumerate(trace) if isinstance(entry, Operation)}
    return {
        (a, b)
        for b, second in operations.items()
        for a, first in operations.items()
        if a < b and a not in after[b] and first.stream != second.stream
        for x in first.accesses
        for y in second.accesses
        if x.storage == y.storage and x.start < y.stop and y.start < x.stop and (x.writes or y.writes)
    }


@pytest.mark.parametrize("seed", range(60))
def test_random_traces_race_if_they_do_by_definition(seed: int) -> None:
    """A stream's last access of a kind stands for its earlier ones: so compare which operator races first."""
    draw = random.Random(seed)
    trace: list[Entry] = []
    for number in range(draw.randrange(4, 30)):
        stream, event = draw.randrange(3), draw.randrange(3)
        match draw.randrange(8):
            case 0 | 1:
                trace.append(Record(event, stream))
            case 2 | 3:
                trace.append(Wait(event, stream))
            case 4 if draw.random() < 0.3:
                host: list[Entry] = [HostWait(event), HostSynchronize(stream), HostSynchronize(None)]
                trace.append(draw.choice(host))
            case _:
                start = draw.randrange(4)
                access = Access(draw.randrange(2), start, start + draw.randrange(1, 4), writes=draw.random() < 0.5)
                trace.append(Operation(draw.choice([stream, HOST]), f"operator {number}", [access]))
    second = {trace.index(race.second) for race in races(trace)}
    assert second == {b for _, b in _by_definition(trace)}


def test_memory_is_not_handed_out_before_recorded_streams_are_done() -> None:
    race = [("read", REDUCE, "next", COMPUTE, True)]
    assert pairs([*REUSED, Recorded(TENSOR, REDUCE), Release(TENSOR), *NEXT]) == []
    assert pairs([*REUSED, Recorded(TENSOR, COPY), Release(TENSOR), *NEXT]) == race
