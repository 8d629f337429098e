"""Proofs that loss scaling and TF32 take effect: what they must change, compared with the record of a neighbour."""

from conformance.laws.axes.differences import expect, same
from conformance.run.record import Record


def loss_scale_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless steps are skipped, and none in the neighbour."""
    skipped, usual = (sum(step.skipped for step in one.ranks[0].steps) for one in (record, neighbour))
    expect(skipped > 0 and usual == 0, f"{skipped} steps are skipped, {usual} with a scale that fits")


def tf32_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless gradients differ from those of the neighbour, from the same weights."""
    expect(same(record, neighbour, "initial/parameter/"), "initial weights differ")
    expect(not same(record, neighbour, "step0/gradient/"), "gradients are the same in every bit with TF32 and without")
