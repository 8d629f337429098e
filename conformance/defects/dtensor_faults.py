"""Faults of DTensor that tensor parallelism as the trainer has it may not show."""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from conformance.defects.injection import Defect, replaced

_PLACEMENTS = "torch.distributed.tensor.placement_types"


def partial_sums(*, averaged: bool) -> AbstractContextManager[None]:
    """Divide what is summed over ranks by their number, or divide and multiply it by two."""

    def make(original: Any) -> Any:
        def reduce_value(placement: Any, tensor: Tensor, mesh: Any, mesh_dim: int) -> Tensor:
            reduced = original(placement, tensor, mesh, mesh_dim)
            return reduced / mesh.size(mesh_dim) if averaged else reduced / 2 * 2  # type: ignore[no-any-return]

        return reduce_value

    return replaced(f"{_PLACEMENTS}:Partial", "_reduce_value", make)


def last_row_exchanged(*, lost: bool) -> AbstractContextManager[None]:
    """Clear the last row of what comes from ranks that had another dimension sharded, or of a copy."""

    def make(original: Any) -> Any:
        def to_new_shard_dim(*args: Any) -> Tensor:
            result: Tensor = original(*args)
            cleared = result if lost else result.clone()
            cleared[-1:].zero_()
            return result

        return to_new_shard_dim

    return replaced(f"{_PLACEMENTS}:Shard", "_to_new_shard_dim", make)


DEFECTS: tuple[Defect, ...] = (
    Defect(
        id="partial-sum-averaged",
        title="a partial sum is averaged over ranks when it is made whole",
        source="https://docs.pytorch.org/docs/stable/distributed.tensor.html",
        mechanism="the reduction divides by the number of ranks, as a mean would",
        laws=("DT-1", "DT-2"),
        inject=partial(partial_sums, averaged=True),
        inject_twin=partial(partial_sums, averaged=False),
    ),
    Defect(
        id="exchange-loses-a-row",
        title="sharded along another dimension, a tensor loses the last row of each rank",
        source="https://docs.pytorch.org/docs/stable/distributed.tensor.html",
        mechanism="an all-to-all of parts that are not equal is cut by one row too many",
        laws=("DT-1",),
        inject=partial(last_row_exchanged, lost=True),
        inject_twin=partial(last_row_exchanged, lost=False),
    ),
)
