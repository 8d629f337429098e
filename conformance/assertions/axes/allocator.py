"""Proof that the configuration of the caching allocator takes effect."""

from conformance.assertions.axes.differences import expect
from conformance.plan.cells import ALLOCATOR_VARIABLES
from conformance.run.record import Record


def expandable_segments_take_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless the ranks had the variables in time, and the allocator obeyed them.

    Ranks must have the variables before they touch the device. A snapshot of the allocator says of each segment whether
    it is expandable. Without the variables no segment is expandable, unless the session's own environment sets them:
    the neighbour must have had other values.
    """
    wanted = record.cell.environment
    for facts, others in zip(record.ranks, neighbour.ranks, strict=False):
        for name in ALLOCATOR_VARIABLES:
            value, usual = facts.variables[name], others.variables[name]
            expect(value == wanted[name], f"{record.cell.id}: {name} is {value} before the device is used")
            expect(value != usual, f"{neighbour.cell.id}: {name} is {usual} too")
    expandable = {facts.expandable_segments for facts in record.ranks}
    expected = record.cell.expandable_segments == "1"
    expect(expandable == {expected}, f"{record.cell.id}: expandable segments: {expandable}, not {expected}")
