"""Proofs that prefetching takes effect: the changes that it must make to the record of a neighbour."""

from collections import Counter

from conformance.assertions.axes.differences import expect
from conformance.run.record import Record


def forward_prefetch_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless as many groups are prefetched as the axis says, and none in the neighbour."""
    for run in (record, neighbour):
        gathers, expected = _most_gathered_at_once(run), 1 + run.cell.forward_prefetch
        expect(gathers == expected, f"{run.cell.id}: a group all-gathers {gathers} groups with its own, not {expected}")


def backward_prefetch_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless FSDP has a list of as many groups as the axis says, and prefetches them.

    In the neighbour FSDP must have no list.
    """
    for run in (record, neighbour):
        told = max((len(groups) for facts in run.ranks for groups in facts.backward_prefetch.values()), default=0)
        expect(told == run.cell.backward_prefetch, f"{run.cell.id}: FSDP is told to prefetch {told} groups")
    gathers, usual = (_gathered_before_reducing(run) for run in (record, neighbour))
    more = record.cell.backward_prefetch - 1
    expect(gathers - usual == more, f"{gathers} all-gathers before the first reduction, {usual} by default")


def _most_gathered_at_once(record: Record) -> int:
    """Return the largest number of all-gathers of FSDP that a rank issued in forward on entering a module."""
    gathers = (
        (facts.rank, e.step, e.during)
        for facts in record.ranks
        for e in facts.collectives
        if (e.phase, e.kind, e.group) == ("forward", "all_gather", "dp_shard")
    )
    return max(Counter(gathers).values())


def _gathered_before_reducing(record: Record) -> int:
    """Return the number of all-gathers that rank 0 issued in the first backward before its first reduce-scatter."""
    kinds = [e.kind for e in record.ranks[0].collectives if (e.phase, e.group) == ("backward", "dp_shard")]
    return kinds.index("reduce_scatter")
