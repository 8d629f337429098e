"""Faults of DTensor that the trainer's tensor parallelism may not show."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from conformance.defects.injection import Defect, replaced_call

_PLACEMENTS = "torch.distributed.tensor.placement_types"


def partial_sums(*, averaged: bool) -> AbstractContextManager[None]:
    """Divide each reduced partial sum by the number of ranks, or divide it and multiply it by two."""

    def reduce_value(
        original: Callable[..., Tensor], placement: Any, tensor: Tensor, mesh: Any, mesh_dim: int
    ) -> Tensor:
        reduced = original(placement, tensor, mesh, mesh_dim)
        return reduced / mesh.size(mesh_dim) if averaged else reduced / 2 * 2

    return replaced_call(f"{_PLACEMENTS}:Partial", "_reduce_value", reduce_value)


PARTIAL_SUM_AVERAGED = Defect(
    id="partial-sum-averaged",
    title="a partial sum is averaged over ranks when it is reduced to a full tensor",
    source="https://docs.pytorch.org/docs/stable/distributed.tensor.html",
    mechanism="the reduction divides by the number of ranks, as a mean would",
    laws=("DT-1", "DT-2"),
    cells="id = dp2-fp32-default-meta",
    inject=partial(partial_sums, averaged=True),
    inject_twin=partial(partial_sums, averaged=False),
)


def last_row_exchanged(*, lost: bool) -> AbstractContextManager[None]:
    """Clear the last row of each shard that an all-to-all makes along another dimension, or the last row of a copy."""

    def to_new_shard_dim(original: Callable[..., Tensor], *args: Any) -> Tensor:
        result = original(*args)
        cleared = result if lost else result.clone()
        cleared[-1:].zero_()
        return result

    return replaced_call(f"{_PLACEMENTS}:Shard", "_to_new_shard_dim", to_new_shard_dim)


EXCHANGE_LOSES_A_ROW = Defect(
    id="exchange-loses-a-row",
    title="sharded along another dimension, a tensor loses the last row of each rank",
    source="https://docs.pytorch.org/docs/stable/distributed.tensor.html",
    mechanism="an all-to-all of uneven shards is cut by one row too many",
    laws=("DT-1",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(last_row_exchanged, lost=True),
    inject_twin=partial(last_row_exchanged, lost=False),
)


def averages(*, lost: bool) -> AbstractContextManager[None]:
    """Take each rank's own mean for the mean of all when a pending average is reduced, or reduce it twice."""

    def reduce_value(
        original: Callable[..., Tensor], placement: Any, tensor: Tensor, mesh: Any, mesh_dim: int
    ) -> Tensor:
        if placement.reduce_op != "avg":
            return original(placement, tensor, mesh, mesh_dim)
        reduced = original(placement, tensor, mesh, mesh_dim)
        return tensor if lost else original(placement, reduced, mesh, mesh_dim)

    return replaced_call(f"{_PLACEMENTS}:Partial", "_reduce_value", reduce_value)


MEAN_OF_OWN_SHARD = Defect(
    id="mean-of-own-shard",
    title="the mean of a sharded tensor is that of each rank's own shard",
    source="https://github.com/pytorch/pytorch/issues/162692",
    mechanism="a pending average is taken for a replicated tensor",
    laws=("DT-3",),
    cells="id = dp2-fp32-default-meta-integer",
    subjects=("mean of squares",),
    inject=partial(averages, lost=True),
    inject_twin=partial(averages, lost=False),
)


def columns_written(*, lost: bool) -> AbstractContextManager[None]:
    """Write into a copy where a number is assigned to an index of a DTensor, or write the number twice."""

    def assign(original: Callable[..., None], tensor: Any, index: Any, value: Any) -> None:
        original(tensor.clone() if lost else tensor, index, value)
        original(tensor.clone() if lost else tensor, index, value)

    return replaced_call("torch.distributed.tensor:DTensor", "__setitem__", assign)


WRITE_THROUGH_VIEW_LOST = Defect(
    id="write-through-view-lost",
    title="what is assigned to a slice of a DTensor is lost, along dimensions that no rank shards, too",
    source="https://github.com/pytorch/pytorch/issues/139735",
    mechanism="the slice is a copy",
    laws=("DT-3",),
    cells="id = dp2-fp32-default-meta-integer",
    subjects=("all assigned",),
    inject=partial(columns_written, lost=True),
    inject_twin=partial(columns_written, lost=False),
)
