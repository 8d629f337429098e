"""AXIS: every axis of the matrix has an effect."""

from conformance.assertions import compare
from conformance.assertions.axes.proofs import neighbours, prove
from conformance.assertions.fixtures import Run
from conformance.judge.law import law
from conformance.plan.cells import Cell

FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"


@law(
    "AXIS-1",
    where="(features <= 2 or features = 3 and (loss_scale = overflows or limit_all_gathers = false)) and mesh != dp1 "
    "and pp = 1 or pp > 1 and model = cut and accumulation = 4 and (features <= 4 or loss_scale = overflows)",
    gaps=["large-world-neighbours", "norms-on-one-shard", "large-models", "large-neighbours"],
    reference=FULLY_SHARD,
)
def test_axis_value_takes_effect(run: Run, cell: Cell) -> None:
    """Every axis value MUST take effect: the record of a cell differs from that of the cell with the axis at its
    default as the axis's proof demands.

    Wrong if the trainer, or torch, silently ignores an option: then every other law passes on it without having judged
    anything. The required differences of each axis are in `conformance/assertions/axes/`.
    """
    pairs = list(neighbours(cell))
    for axis, shown, neighbour in pairs:
        prove(axis, run(shown), run(neighbour))
    axes = ", ".join(axis for axis, _, _ in pairs)
    compare.count(len(pairs), name="axes that take effect", expected=max(1, len(pairs)), unit=f"axes ({axes})")
