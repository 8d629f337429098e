"""Proofs that prefetching takes effect: what it must change in a record, compared with that of a neighbour."""

from collections import Counter

from conformance.laws.axes.differences import expect
from conformance.run.record import Record


def forward_prefetch_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless as many groups are prefetched as the axis says, and none in the neighbour."""
    for one in (record, neighbour):
        gathers, expected = _most_gathered_at_once(one), 1 + one.cell.forward_prefetch
        expect(gathers == expected, f"{one.cell.id}: a group all-gathers {gathers} groups with its own, not {expected}")


def backward_prefetch_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless FSDP was told to prefetch as many groups, and does, and not in the neighbour."""
    for one in (record, neighbour):
        told = max((len(groups) for facts in one.ranks for groups in facts.backward_prefetch.values()), default=0)
        expect(told == one.cell.backward_prefetch, f"{one.cell.id}: FSDP is told to prefetch {told} groups")
    gathers, usual = (_gathered_before_reducing(one) for one in (record, neighbour))
    more = record.cell.backward_prefetch - 1
    expect(gathers - usual == more, f"{gathers} all-gathers before the first reduction, {usual} by default")


def _most_gathered_at_once(record: Record) -> int:
    """The largest number of FSDP's all-gathers that a rank issued in forward while it entered one module of a step."""
    gathers = (
        (facts.rank, e.step, e.during)
        for facts in record.ranks
        for e in facts.collectives
        if (e.phase, e.kind, e.group) == ("forward", "all_gather", "dp_shard")
    )
    return max(Counter(gathers).values())


def _gathered_before_reducing(record: Record) -> int:
    """Number of all-gathers that rank 0 issued in the first backward before its first reduce-scatter."""
    kinds = [e.kind for e in record.ranks[0].collectives if (e.phase, e.group) == ("backward", "dp_shard")]
    return kinds.index("reduce_scatter")
