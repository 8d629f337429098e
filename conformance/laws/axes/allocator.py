"""What the configuration of a device's allocator changes in a record."""

from conformance.laws.axes.differences import expect
from conformance.plan.cells import ALLOCATOR_VARIABLES
from conformance.run.record import Record


def expandable_segments_take_effect(record: Record, neighbour: Record) -> None:
    """The ranks MUST have had the variables before they touched the device, and its allocator must have obeyed: its
    snapshot says of each segment whether it can grow.

    Without the variables nothing can grow, which is the allocator's default, unless the session's own environment says
    otherwise: the neighbour's must be other variables.
    """
    wanted = record.cell.environment
    for facts, others in zip(record.ranks, neighbour.ranks, strict=False):
        for name in ALLOCATOR_VARIABLES:
            found, usual = facts.variables[name], others.variables[name]
            expect(found == wanted[name], f"{record.cell.id}: {name} is {found} before the device is used")
            expect(found != usual, f"{neighbour.cell.id}: {name} is {usual}, too")
    found_segments = {facts.expandable_segments for facts in record.ranks}
    expected = record.cell.expandable_segments == "1"
    expect(found_segments == {expected}, f"{record.cell.id}: segments that can grow: {found_segments}, not {expected}")
