"""DTensors on some of the ranks: calls that all ranks make, of which those outside of the mesh hold nothing."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, zeros

from conformance.sweeps.covering_sweep import Options, forbids
from conformance.sweeps.interface_sweep import SIZES, Faults, Interface, layout_of, layouts, shape_of
from conformance.sweeps.layouts import difference, integers, is_member


def _replicated(x: Tensor) -> Tensor:
    return x.redistribute(placements=[Replicate()]) if isinstance(x, DTensor) else x


def _returned_from_local(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return x
    return DTensor.from_local(x.to_local(), x.device_mesh, x.placements, shape=x.shape, stride=x.stride())


def _zeros(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return torch.zeros(x.shape)
    return zeros(*x.shape, device_mesh=x.device_mesh, placements=x.placements)


_REFUSING_BACKWARD: Mapping[str, Callable[[Tensor], Any]] = {
    # findings/backward_outside_of_mesh.py
    "redistribute": _replicated,
    "from_local": _returned_from_local,
}
_CALLS: Mapping[str, Callable[[Tensor], Any]] = {
    "sum with a number": lambda x: x + 1,
    "sum of dim 0": lambda x: x.sum(0),
    "sum": lambda x: x.sum(),
    "parts": lambda x: torch.split(x, 1),
    "maximum": lambda x: tuple(x.max(1)),
    "product": lambda x: x @ x.t(),
    "change in place": lambda x: x.clone().mul_(2),
    "equal": lambda x: torch.equal(x, x.clone()),
    "not equal": lambda x: torch.equal(x, x + 1),
    "view": lambda x: x.view(1, *x.shape),
    "dropout of all": lambda x: torch.nn.functional.dropout(x, 1.0),
    "written as out": lambda x: torch.mul(x.detach(), 2, out=x.detach().clone()),
    # Not the largest element, see findings/inf_norm_of_empty_shard.py: ranks with elements wait for one without.
    "norm of two": lambda x: torch.nn.utils.get_total_norm([x.detach(), x.detach()], 1.0),
    "zeros": _zeros,
    "is pinned": lambda x: x.is_pinned(),
    **_REFUSING_BACKWARD,
}
"""Calls that all ranks make, those outside of the mesh, too."""


class _Members:
    """Half of the ranks of a mesh of trials, as a mesh that is made for the first of them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], DeviceMesh] = {}

    def on(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the mesh of half of the ranks. A collective of all ranks."""
        names = mesh.mesh_dim_names or ()
        if names not in self._kept:
            ranks = [*range(mesh.size() // 2)]
            self._kept = {names: DeviceMesh(mesh.device_type, ranks, mesh_dim_names=(f"{names[0]}_members",))}
        return self._kept[names]


def tensor_of_other_ranks(mesh: DeviceMesh) -> Interface:
    """Return the interface of tensors on half of the ranks of a mesh.

    Two ranks leave out what is known to fail, as a share of a sweep does.
    """
    members = _Members()
    failing = forbids("call", "backward", when=lambda call, backward: backward and call in _REFUSING_BACKWARD)
    return Interface(
        "distribute_tensor, other ranks",
        distribute_tensor,
        values={"placements": layouts(1, ("S0", "S1", "R"))},
        faults=lambda options, mesh: _called(options, members.on(mesh)),
        given=("tensor", "device_mesh", "src_data_rank"),
        conditions={"call": tuple(_CALLS), "size": SIZES, "backward": (False, True)},
        rules=[failing] if mesh.size() == 2 else [],
    )


def _called(options: Options, members: DeviceMesh) -> Faults:
    full = integers(*shape_of(options["size"], members))
    given = distribute_tensor(full.clone(), members, layout_of(options["placements"])).requires_grad_()
    single = full.clone().requires_grad_()
    call = _CALLS[options["call"]]
    measured, expected = (call(x) for x in (given, single))
    if isinstance(expected, bool):
        if measured is not expected:
            yield "result", f"{measured}, expected {expected}"
        return
    pairs = [*zip(*((each,) if isinstance(each, Tensor) else each for each in (measured, expected)), strict=True)]
    for one, other in pairs:
        yield from _compared("result", one, other)
    if options["backward"]:
        if not any(other.requires_grad for _, other in pairs):
            return
        torch.autograd.backward([one.sum() for one, _ in pairs if one.requires_grad])
        torch.autograd.backward([other.sum() for _, other in pairs if other.requires_grad])
        yield from _compared("gradient", given.grad, single.grad)


def _compared(fault: str, measured: Tensor | None, expected: Tensor | None) -> Faults:
    """Yield a fault if a tensor is wrong on a rank of its mesh, or another rank has another shape or dtype of it."""
    assert isinstance(measured, DTensor)
    assert expected is not None
    if is_member(measured.device_mesh):
        if text := difference(measured, expected, bound=0.0):
            yield fault, text
    elif (measured.shape, measured.dtype) != (expected.shape, expected.dtype):
        yield fault, f"{measured.dtype} of {tuple(measured.shape)} outside of the mesh"
    elif expected.ndim and measured.to_local().numel():
        yield fault, f"{measured.to_local().numel()} elements outside of the mesh"
