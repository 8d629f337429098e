"""Conversions of DTensors that have nothing to do: to the layout of the tensor, or of a gradient that there is not."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from conformance.sweeps.covering_sweep import Options
from conformance.sweeps.interface_sweep import SIZES, Faults, Interface, layout_of, layouts, shape_of
from conformance.sweeps.layouts import difference, distributed, integers, placed_shard, spelled


def corners(mesh: DeviceMesh) -> Iterator[Interface]:
    """Yield the interfaces."""
    every = layouts(mesh.ndim, ("R", "S0", "S1"))
    yield Interface(
        "distribute_tensor, DTensor",
        distribute_tensor,
        values={"placements": every},
        faults=_distributed_twice,
        given=("tensor", "device_mesh", "src_data_rank"),
        conditions={"size": SIZES},
    )
    yield Interface(
        "DTensor.to_local, no gradient",
        DTensor.to_local,
        values={},
        faults=_converted_without_gradient,
        given=("grad_placements",),
        conditions={"source": every, "direction": ("to plain", "from plain")},
    )


def _distributed_twice(options: Options, mesh: DeviceMesh) -> Faults:
    """Distribute a tensor as it is distributed already, which must leave it so."""
    full, layout = integers(*shape_of(options["size"], mesh)), layout_of(options["placements"])
    result = distribute_tensor(distributed(full, mesh, layout), mesh, layout)
    if tuple(result.placements) != layout:
        yield "layout", spelled(result.placements)
    elif text := difference(result, full, bound=0.0):
        yield "result", text


class _WithoutGradient(torch.autograd.Function):
    """Copy of a tensor whose backward has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> None:
        return None


def _converted_without_gradient(options: Options, mesh: DeviceMesh) -> Faults:
    """Convert a tensor of which backward then has no gradient, beside one of which it has."""
    full, layout = integers(*shape_of("even", mesh)), layout_of(options["source"])
    is_plain = options["direction"] == "from plain"
    lost, kept = ((placed_shard if is_plain else distributed)(full, mesh, layout) for _ in range(2))
    for leaf in (lost, kept):
        leaf.requires_grad_()
    one, other = (
        DTensor.from_local(leaf, mesh, layout) if is_plain else leaf.to_local()  # type: ignore[attr-defined]
        for leaf in (lost, kept)
    )
    copy: Tensor = _WithoutGradient.apply(one)  # type: ignore[no-untyped-call]
    torch.autograd.backward((copy + other).sum())
    if lost.grad is not None:
        yield "gradient", f"{lost.grad}, expected none"
    if kept.grad is None:
        yield "other gradient", "there is none"
        return
    replicated = (Replicate(),) * mesh.ndim
    wanted = placed_shard(torch.ones_like(full), mesh, layout if is_plain else replicated)
    if is_plain and (text := difference(kept.grad, wanted, bound=0.0)):
        yield "other gradient", text
