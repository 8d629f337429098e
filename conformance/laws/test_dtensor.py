"""DT: a DTensor is the tensor that its parts make up, wherever they are."""

from conformance.judge.law import Measure, law
from conformance.laws import compare
from conformance.plan.cells import Cell

DTENSOR = "https://docs.pytorch.org/docs/stable/distributed.tensor.html"


@law("DT-1", reference=DTENSOR, since="2.13")
def test_redistribution_keeps_the_tensor(measure: Measure, cell: Cell) -> None:
    """Redistributed from any layout to any other, a DTensor MUST have on each rank the part that the layout says, in
    every bit, be the same tensor as a whole, and pass gradients on likewise; also where ranks have unequal parts.
    """
    for rank, found in enumerate(measure("dtensor:redistribute", cell)):
        if not found["tried"]:
            raise RuntimeError(f"cell {cell.id}: nothing was redistributed")
        for what in ("local", "full", "gradient"):
            detail = f"rank {rank}, {found['tried']} pairs of layouts"
            compare.count(found[what], name=f"{what}: wrong elements", expected=0, detail=detail, unit="elements")


@law("DT-2", reference=DTENSOR, since="2.13")
def test_operators_compute_on_the_whole(measure: Measure, cell: Cell) -> None:
    """An operator on DTensors MUST give the result and the gradients that it gives on whole tensors, however they are
    laid out, or refuse to compute.

    Wrong also if it refuses all layouts.
    """
    ranks = measure("dtensor:operate", cell)
    for name in ranks[0]:
        for rank, found in enumerate(outcome[name] for outcome in ranks):
            detail = f"rank {rank}, {found['computed']} layouts, {found['refused']} refused"
            compare.count(found["wrong"], name=f"{name}: wrong elements", expected=0, detail=detail, unit="elements")
            compare.count(
                int(found["computed"] == 0), name=f"{name}: refused everywhere", expected=0, detail=detail, unit="ranks"
            )
