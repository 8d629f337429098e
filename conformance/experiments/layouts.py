"""Layouts of DTensors: shards that are cut here and not by DTensor, and comparison of what a rank holds."""

from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

Layout = tuple[Placement, ...]
"""Placement for each dimension of the mesh."""


def distributed(full: Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """Return a DTensor whose shards this module, and not DTensor, has cut from a tensor of any shape and dtype."""
    shard = shard_of(full, mesh, layout).contiguous()
    return DTensor.from_local(shard, mesh, layout, run_check=False, shape=full.shape, stride=full.stride())


def shard_of(full: Tensor, mesh: DeviceMesh, layout: Layout) -> Tensor:
    """Return this rank's shard: for each mesh dimension that shards, a chunk of the chunk of the dimension before.

    A strided shard, which FSDP makes of one of tensor parallelism, is a chunk of the chunks of all other dimensions.

    For a pending sum every element is the rank's number, but on the first rank the remainder of the sum; for a pending
    average the ranks differ by twice their distance from the middle; of a pending maximum or minimum the last rank has
    the result, and the others less or more. No rank's own numbers are the result, but there.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    shard = full
    for dim in sorted(range(mesh.ndim), key=lambda dim: _is_strided(layout[dim])):
        placement, index, size = layout[dim], coordinate[dim], mesh.size(dim)
        if isinstance(placement, Shard) or _is_strided(placement):
            along = cast("Shard", placement).dim
            rows = -(-shard.size(along) // size)
            begin = min(index * rows, shard.size(along))
            shard = shard.narrow(along, begin, min(rows, shard.size(along) - begin))
        elif isinstance(placement, Partial):
            shard = _pending(shard, placement.reduce_op, index, size)
    return shard.clone()


def _is_strided(placement: Placement) -> bool:
    """Return whether a placement is a strided shard, whose class is not public."""
    return hasattr(placement, "split_factor")


def _pending(full: Tensor, reduction: str, index: int, size: int) -> Tensor:
    """Return the numbers of one of `size` ranks which the reduction makes `full` again."""
    match reduction:
        case "sum":
            return full - sum(range(1, size)) if index == 0 else torch.full_like(full, index)
        case "avg":
            return full + 2 * index - (size - 1)
        case "max":
            return full - (size - 1 - index)
        case "min":
            return full + (size - 1 - index)
    raise ValueError(f"no numbers for a pending {reduction}: give sum, avg, max or min")


def is_cut(measured: DTensor, expected: Tensor) -> bool:
    """Return whether a rank's numbers of a tensor of the expected shape are a shard of it, or all of it."""
    return measured.shape == expected.shape and all(
        type(at) in (Replicate, Shard) or _is_strided(at) for at in measured.placements
    )
