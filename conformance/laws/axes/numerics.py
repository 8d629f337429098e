"""What loss scaling and TF32 must change in a record, beside the record of a neighbour."""

from conformance.laws.axes.differences import expect, same
from conformance.run.record import Record


def loss_scale_takes_effect(record: Record, neighbour: Record) -> None:
    """Proof of axis `loss_scale`."""
    skipped, usual = (sum(step.skipped for step in one.ranks[0].steps) for one in (record, neighbour))
    expect(skipped > usual == 0, f"{skipped} steps are skipped, {usual} with a scale that fits")


def tf32_takes_effect(record: Record, neighbour: Record) -> None:
    """Proof of axis `tf32`."""
    expect(same(record, neighbour, "initial/parameter/"), "initial weights differ")
    expect(not same(record, neighbour, "step0/gradient/"), "gradients are the same in every bit with TF32 and without")
