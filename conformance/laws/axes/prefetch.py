"""What prefetching must change in a record, beside the record of a neighbour: proofs of `axes.py`."""

from collections import Counter

from conformance.laws.axes.differences import expect
from conformance.run.record import Record


def forward_prefetch_takes_effect(record: Record, neighbour: Record) -> None:
    """Raises ConformanceFailure unless groups are gathered so far ahead, and none in the neighbour."""
    for one in (record, neighbour):
        found, expected = _most_gathered_at_once(one), 1 + one.cell.forward_prefetch
        expect(found == expected, f"{one.cell.id}: a group gathers {found} groups with its own, not {expected}")


def backward_prefetch_takes_effect(record: Record, neighbour: Record) -> None:
    """Raises ConformanceFailure unless FSDP was told to gather so far ahead, and does, and not in the neighbour."""
    for one in (record, neighbour):
        told = max((len(ahead) for facts in one.ranks for ahead in facts.backward_prefetch.values()), default=0)
        expect(told == one.cell.backward_prefetch, f"{one.cell.id}: FSDP is told to gather {told} groups ahead")
    ahead, usual = (_gathered_before_reducing(one) for one in (record, neighbour))
    more = record.cell.backward_prefetch - 1
    expect(ahead - usual == more, f"{ahead} all-gathers before the first reduction, {usual} by default")


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
