"""Layouts of DTensors: shards that are cut here and not by DTensor, and comparison of tensors on a rank.

Full tensors are on the CPU, shards on the device of their mesh; comparison is on the CPU.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from conformance.instruments.sharding import full as full_tensor

Layout = tuple[Placement, ...]
"""Placement for each dimension of the mesh."""


def distributed(full: Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """Return a DTensor whose shards this module, and not DTensor, has cut from a tensor of any shape and dtype."""
    shard = placed_shard(full, mesh, layout)
    return DTensor.from_local(shard, mesh, layout, run_check=False, shape=full.shape, stride=full.stride())


def is_member(mesh: DeviceMesh) -> bool:
    """Return whether this rank is on a mesh."""
    return mesh.get_coordinate() is not None


def placed_shard(full: Tensor, mesh: DeviceMesh, layout: Layout) -> Tensor:
    """Return this rank's shard as a plain tensor on the device of the mesh."""
    return shard_of(full, mesh, layout).contiguous().to(mesh.device_type)


def strided_rows(mesh: DeviceMesh) -> Layout:
    """Return the layout that FSDP gives, on a mesh with names, to a weight that tensor parallelism shards by rows."""
    return _sharded_along(0, ColwiseParallel(), mesh)


def strided_columns(mesh: DeviceMesh) -> Layout:
    """Return the layout of a weight whose columns tensor parallelism shards, and then FSDP."""
    return _sharded_along(1, RowwiseParallel(), mesh)


def _sharded_along(dim: int, style: ParallelStyle, mesh: DeviceMesh) -> Layout:
    assert mesh.mesh_dim_names is not None
    dp, tp = mesh.mesh_dim_names
    size = 4 * mesh.size(1)
    linear = parallelize_module(nn.Linear(size, size, bias=False), mesh[tp], style)
    fully_shard(linear, mesh=mesh[dp], shard_placement_fn=lambda _parameter: Shard(dim))
    assert isinstance(linear.weight, DTensor)
    return tuple(linear.weight.placements)


def shard_of(full: Tensor, mesh: DeviceMesh, layout: Layout) -> Tensor:
    """Return this rank's shard: for each mesh dimension that shards, a chunk of the chunk of the dimension before.

    A strided shard has its chunk of each of the chunks that its split factor makes.

    For a pending sum every element is the rank's number, except that the first rank has the remainder of the sum; for a
    pending average ranks differ by twice their distance from the middle; of a pending maximum or minimum the last rank
    alone has the result.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    shard = full
    for placement, index, size in zip(layout, coordinate, (mesh.size(dim) for dim in range(mesh.ndim)), strict=True):
        if isinstance(placement, Shard):
            shard = _chunk(shard, placement.dim, index, size)
        elif hasattr(placement, "split_factor"):  # a strided shard, whose class is not public
            along, factor = cast("Shard", placement).dim, cast("Any", placement).split_factor
            chunks = [_chunk(shard, along, number, factor) for number in range(factor)]
            shard = torch.cat([_chunk(chunk, along, index, size) for chunk in chunks], along)
        elif isinstance(placement, Partial):
            shard = _pending(shard, placement.reduce_op, index, size)
    return shard.clone()


def _chunk(tensor: Tensor, dim: int, index: int, count: int) -> Tensor:
    """Return one of `count` chunks of a dimension, of which the last may be smaller or empty."""
    rows = -(-tensor.size(dim) // count)
    begin = min(index * rows, tensor.size(dim))
    return tensor.narrow(dim, begin, min(rows, tensor.size(dim) - begin))


def _pending(full: Tensor, reduction: str, index: int, size: int) -> Tensor:
    """Return the numbers of one of `size` ranks, which the reduction over all ranks turns into `full`."""
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


def without_pending(layout: Sequence[Placement]) -> Layout:
    """Return a layout with replicas instead of pending numbers, as gradients have it."""
    return tuple(Replicate() if at.is_partial() else at for at in layout)


def counted_from_first(layout: Sequence[Placement], ndim: int) -> Layout:
    """Return a layout whose dimensions of shards are counted from the first, and not from the last."""
    return tuple(Shard(at.dim % ndim) if isinstance(at, Shard) else at for at in layout)


def is_cut(measured: DTensor, expected: Tensor) -> bool:
    """Return True if a tensor has the expected shape, and each rank a shard or all of it, without pending sums."""
    return measured.shape == expected.shape and all(type(at) in (Replicate, Shard) for at in measured.placements)


def integers(*shape: int, low: int = -2, high: int = 2, seed: int = 0) -> Tensor:
    """Return integers from `low` to `high`, in fp32 and on the CPU."""
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def varied(like: Tensor) -> Tensor:
    """Return a plain tensor of the shape and dtype of another one, of integers that differ from element to element.

    It is on the CPU.
    """
    return (torch.arange(like.shape.numel()) % 5 - 2).reshape(like.shape).to(like.dtype)


def difference(
    measured: Tensor | None, expected: Tensor | None, *, bound: float | None, layout: Layout | None = None
) -> str:
    """Return the difference of a tensor from the expected full tensor, or from the expected shard of a layout.

    Empty if there is none. `bound` is on the deviation, relative to the largest expected number if that is above 1; 0
    requires equal numbers, None equal bits. A collective if ranks hold no shards of such a layout.
    """
    if measured is None or expected is None:
        return "" if measured is expected else f"there is {'none' if measured is None else 'one'}"
    text = ""
    if isinstance(measured, DTensor):
        text = f"{spelled(measured.placements)} "
        if measured.shape != expected.shape and layout is None:
            return f"{text}{_kind(measured)}, expected {_kind(expected)}"
        measured, expected = _alike(measured, expected, layout)
    measured, expected = measured.detach().cpu(), expected.detach().cpu()
    if _kind(measured) != _kind(expected):
        return f"{text}{_kind(measured)}, expected {_kind(expected)}"
    if _are_equal(measured, expected, bound):
        return ""
    return f"{text}{_numbers(measured)}, expected {_numbers(expected)}"


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return copies of the full parameters, and of the optimizer's state by `NAME/KIND`. A collective."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = full_tensor(parameter).clone()
        for kind, value in optimizer.state[parameter].items():
            tensors[f"{name}/{kind}"] = full_tensor(value).clone()
    return tensors


def spelled(layout: Sequence[Placement]) -> str:
    """Return a layout as text."""
    return f"({', '.join(str(at) for at in layout)})"


def _alike(measured: DTensor, expected: Tensor, layout: Layout | None) -> tuple[Tensor, Tensor]:
    """Return plain tensors to compare: shards if the tensor has the layout, or without a layout if it is sharded."""
    mesh = measured.device_mesh
    if layout is not None:
        is_held = layout == tuple(measured.placements)
        return measured.to_local() if is_held else shard_of(measured.full_tensor().cpu(), mesh, layout), expected
    if is_cut(measured, expected):
        return measured.to_local(), shard_of(expected.detach(), mesh, measured.placements)
    return measured.full_tensor(), expected


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def _are_equal(measured: Tensor, expected: Tensor, bound: float | None) -> bool:
    if bound is None:
        return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (measured, expected)))
    if not bound or not expected.is_floating_point():
        return bool(((measured == expected) | (measured.isnan() & expected.isnan())).all())
    finite = expected[expected.isfinite()]
    scale = max(1.0, float(finite.abs().max()) if finite.numel() else 1.0)
    return torch.allclose(measured, expected, rtol=0.0, atol=bound * scale, equal_nan=True)


def _numbers(tensor: Tensor) -> str:
    numbers = [round(number, 4) if isinstance(number, float) else number for number in tensor.flatten()[:6].tolist()]
    return f"{numbers}"
