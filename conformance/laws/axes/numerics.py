"""Proofs that loss scaling and TF32 take effect: the changes that each must make to the record of a neighbour."""

from conformance.laws.axes.differences import expect, same
from conformance.run.record import Record


def loss_scale_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless steps are skipped, and no step in the neighbour."""
    skipped, usual = (sum(step.skipped for step in run.ranks[0].steps) for run in (record, neighbour))
    expect(skipped > 0 and usual == 0, f"{skipped} steps are skipped, {usual} with a scale that fits")


def tf32_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless gradients from the same weights differ from those of the neighbour."""
    expect(same(record, neighbour, "initial/parameter/"), "initial weights differ")
    expect(not same(record, neighbour, "step0/gradient/"), "gradients are the same in every bit with TF32 and without")
