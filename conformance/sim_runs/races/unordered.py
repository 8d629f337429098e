"""Unordered pairs of operators in the trace of a process."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from conformance.experiments.device_entries import entries_of
from conformance.instruments.happens_before import Race, unordered
from conformance.sim.recorded import Place
from conformance.sim.trace import Bytes
from conformance.sim_runs.races.findings import Issued, Pair
from conformance.sim_runs.races.program import Program


class Group(NamedTuple):
    """Unordered pairs of a process with the same operators, streams and lines; the first stands for all."""

    pair: Pair
    numbers: list[tuple[int, int]]
    """Numbers of both operators of each pair; an access of the host has number 0."""


def key(pair: Pair) -> object:
    """Return an object that is equal for pairs that only other numbers and processes tell apart."""
    return (*((issued.operator, issued.stream, issued.program) for issued in (pair.first, pair.second)), pair.is_reuse)


def groups(program: Program) -> tuple[list[Group], list[Group]]:
    """Return the unordered pairs of a process, and the pairs that only waits of the host order."""
    without_waits = _races(program, reads_order=False)
    ordered_by_reads = _races(program, reads_order=True) if without_waits else []  # waits only add order
    known = {_positions(race) for race in ordered_by_reads}
    held = [race for race in without_waits if _positions(race) not in known]
    return _grouped(program, ordered_by_reads, is_held=False), _grouped(program, held, is_held=True)


def _races(program: Program, *, reads_order: bool) -> list[Race]:
    """Return the races; the site of each operation is its position in the trace."""
    entries = entries_of(program.trace, first=0, site=lambda position: position, reads_order=reads_order)
    return list(unordered(entries))


def _positions(race: Race) -> tuple[int, int]:
    return race.first.site, race.second.site


def _grouped(program: Program, races: Sequence[Race], *, is_held: bool) -> list[Group]:
    found: dict[object, Group] = {}
    for race in races:
        first, second = map(program.issued, _positions(race))
        pair = Pair(first, second, race.reused, None, None, {}, [])
        if key(pair) not in found:
            released = _released(program, race) if race.reused else None
            wait = _wait_after(program, first) if is_held else None
            found[key(pair)] = Group(replace(pair, released=released, wait=wait), [])
        found[key(pair)].numbers.append((first.number, second.number))
    return [*found.values()]


def _released(program: Program, race: Race) -> Place | None:
    """Return the line that released the memory that the first operator accesses."""
    entry = program.trace[race.first.site]
    ranges = zip((*entry.reads, *entry.writes), race.first.accesses, strict=True)
    accessed = [at for at, access in ranges if access.storage == race.storage]
    for later in program.trace[race.first.site : race.second.site]:
        if later.kind.startswith("free") and any(_contains(later.writes[0], at) for at in accessed):
            return program.site(later).program
    return None


def _contains(freed: Bytes, at: Bytes) -> bool:
    return freed[0] == at[0] and freed[1] <= at[1] < freed[2]


def _wait_after(program: Program, first: Issued) -> Place | None:
    """Return the line of the first wait of the host after an operator that covers the operator's stream."""
    position = program.positions[first.number]
    stream = program.trace[position].stream
    for entry in program.trace[position:]:
        if entry.kind in ("host_wait_read", "host_wait_device") and entry.stream == stream:
            return program.site(entry).program
    return None
