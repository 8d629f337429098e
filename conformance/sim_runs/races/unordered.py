"""Unordered pairs of operators in the trace of a process."""

from collections.abc import Iterator, Sequence

import msgspec

from conformance.experiments.device_entries import entries_of
from conformance.instruments.happens_before import Race, unordered
from conformance.sim.recorded import Place
from conformance.sim.trace import Bytes
from conformance.sim_runs.races.findings import Pair
from conformance.sim_runs.races.program import Program

_READS = ("host_wait_read", "host_wait_device")


def pairs(program: Program) -> tuple[list[Pair], list[Pair]]:
    """Return the unordered pairs of a process, and those that only the host's waits for all it reads order."""
    ordered_by_reads = _races(program, reads_order=True)
    known = {_positions(race) for race in ordered_by_reads}
    held = [race for race in _races(program, reads_order=False) if _positions(race) not in known]
    return _grouped(program, ordered_by_reads), [
        msgspec.structs.replace(pair, wait=_wait_between(program, pair)) for pair in _grouped(program, held)
    ]


def _races(program: Program, *, reads_order: bool) -> list[Race]:
    """Return the races; the site of each operation is its position in the trace."""
    entries = entries_of(program.trace, first=0, site=lambda position: position, reads_order=reads_order)
    return list(unordered(entries))


def _positions(race: Race) -> tuple[int, int]:
    return race.first.site, race.second.site


def _grouped(program: Program, races: Sequence[Race]) -> list[Pair]:
    """Return the first pair of each two operators, streams and lines, with the number of pairs."""
    groups: dict[tuple[object, ...], tuple[Race, int]] = {}
    for race in races:
        places = (program.site(program.trace[position]).program for position in _positions(race))
        streams = race.first.stream, race.second.stream
        kind = (race.first.operator, race.second.operator, *streams, *places, race.reused)
        first, count = groups.get(kind, (race, 0))
        groups[kind] = first, count + 1
    return [_pair(program, race, count) for race, count in groups.values()]


def _pair(program: Program, race: Race, count: int) -> Pair:
    first, second = map(program.issued, _positions(race))
    released = _released(program, race) if race.reused else None
    return Pair(program.name, first, second, released, race.reused, count)


def _released(program: Program, race: Race) -> Place | None:
    """Return the line that let go of the memory that the first operator accesses."""
    entry = program.trace[race.first.site]
    ranges = zip((*entry.reads, *entry.writes), race.first.accesses, strict=True)
    accessed = [at for at, access in ranges if access.storage == race.storage]
    for later in program.trace[race.first.site : race.second.site]:
        if later.kind.startswith("free") and any(_contains(later.writes[0], at) for at in accessed):
            return program.site(later).program
    return None


def _contains(freed: Bytes, at: Bytes) -> bool:
    return freed[0] == at[0] and freed[1] <= at[1] < freed[2]


def _wait_between(program: Program, pair: Pair) -> Place | None:
    """Return the line of the first wait of the host after the first operator that covers the operator's stream."""
    first = program.positions[pair.first.number]
    stream = program.trace[first].stream
    return next(_waits(program, first, stream), None)


def _waits(program: Program, first: int, stream: int) -> Iterator[Place]:
    for entry in program.trace[first:]:
        if entry.kind in _READS and (entry.stream == stream or entry.kind == "host_wait_device"):
            if place := program.site(entry).program:
                yield place
