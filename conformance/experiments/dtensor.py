"""What ranks measure of DTensor beside a plain tensor: redistribution from any placement to any, and operators.

Numbers are whole and small, so that sums are exact in whatever order, and dimensions do and do not divide among ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from conformance.defects.catalogue import injected
from conformance.experiments.context import start_process_group
from conformance.experiments.training import rank_config
from conformance.run.ranks.messages import RankContext
from reference_trainer.mesh import build_mesh, destroy_process_group
from reference_trainer.parallel_dims import resolve_mesh

_SHAPES = ((8, 4), (5, 3), (1, 7))
_LAYOUTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1))

Layout = tuple[Placement, ...]
"""A placement for each dimension of the mesh."""


def redistribute(context: RankContext, payload: dict[str, Any]) -> dict[str, int]:
    """From every layout, partial sums included, to every other: how many were tried, and the elements that are wrong:
    of this rank's part (`local`), of the whole (`full`), and of the gradient of what was redistributed (`gradient`).
    """
    found: dict[str, int] = _on_mesh(context, payload, _redistributed)
    return found


def operate(context: RankContext, payload: dict[str, Any]) -> dict[str, dict[str, int]]:
    """For each operator, over all layouts of what it is given: how many layouts it `computed`, how many it `refused`,
    and the elements of results and gradients that are `wrong`."""
    found: dict[str, dict[str, int]] = _on_mesh(context, payload, _operators)
    return found


def _on_mesh(context: RankContext, payload: dict[str, Any], measured: Callable[[DeviceMesh], Any]) -> Any:
    config = rank_config(context, payload)
    with injected(payload["defect"]):
        device = start_process_group(context)
        found = measured(build_mesh(resolve_mesh(config.mesh, world_size=context.world_size), device))
        destroy_process_group()
    return found


def _redistributed(mesh: DeviceMesh) -> dict[str, int]:
    found = {"tried": 0, "local": 0, "full": 0, "gradient": 0}
    for shape in _SHAPES:
        whole, weights = _numbers(mesh, shape, seed=0), _numbers(mesh, shape, seed=1)
        for source, target in product(_layouts(mesh, (*_LAYOUTS, Partial())), _layouts(mesh, _LAYOUTS)):
            given = _distributed(whole, mesh, source)
            given.requires_grad_()
            result = given.redistribute(placements=target)
            torch.autograd.backward((result * _distributed(weights, mesh, target)).sum())
            assert isinstance(given.grad, DTensor)
            found["tried"] += 1
            found["local"] += _wrong(result.to_local(), _part(whole, mesh, target))
            found["full"] += _wrong(result.full_tensor(), whole)
            found["gradient"] += _wrong(given.grad.full_tensor(), weights)
    return found


def _operators(mesh: DeviceMesh) -> dict[str, dict[str, int]]:
    return {name: _applied(mesh, operator, shapes) for name, (operator, shapes) in _OPERATORS.items()}


def _applied(mesh: DeviceMesh, operator: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    plain = [_numbers(mesh, shape, seed=index).requires_grad_() for index, shape in enumerate(shapes)]
    expected = operator(*plain)
    torch.autograd.backward(expected.sum())
    found = {"computed": 0, "refused": 0, "wrong": 0}
    for layouts in product(*([*_layouts(mesh, _LAYOUTS[: 1 + len(shape)])] for shape in shapes)):
        given = [_distributed(x.detach(), mesh, at).requires_grad_() for x, at in zip(plain, layouts, strict=True)]
        try:
            result = operator(*given)
        except (RuntimeError, NotImplementedError):
            found["refused"] += 1
            continue
        assert isinstance(result, DTensor)
        found["computed"] += 1
        found["wrong"] += _wrong(result.full_tensor(), expected)
        torch.autograd.backward(result.sum())
        for x, own in zip(plain, given, strict=True):
            assert isinstance(own.grad, DTensor)
            assert x.grad is not None
            found["wrong"] += _wrong(own.grad.full_tensor(), x.grad)
    return found


_OPERATORS: dict[str, tuple[Callable[..., Tensor], Sequence[tuple[int, ...]]]] = {
    "matrix product": (torch.mm, ((6, 4), (4, 5))),
    "linear": (F.linear, ((5, 4), (6, 4))),
    "sum with a row": (torch.add, ((5, 3), (3,))),
    "product of two": (torch.mul, ((5, 3), (5, 3))),
    "sum": (torch.sum, ((5, 3),)),
    "sum of rows": (lambda x: x.sum(0), ((5, 3),)),
    "mean of four columns": (lambda x: x.mean(1, keepdim=True), ((5, 4),)),
    "relu": (torch.relu, ((5, 3),)),
    "square": (torch.square, ((5, 3),)),
    "transpose": (lambda x: x.t(), ((5, 3),)),
    "two in a row": (lambda x, y: torch.cat([x, y], 1), ((4, 2), (4, 2))),
    "columns apart": (lambda x: x.view(4, 2, 4), ((4, 8),)),
    "slice": (lambda x: x[1:3], ((5, 3),)),
}


def _layouts(mesh: DeviceMesh, placements: Sequence[Placement]) -> Iterator[Layout]:
    return product(placements, repeat=mesh.ndim)


def _numbers(mesh: DeviceMesh, shape: tuple[int, ...], *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float().to(mesh.device_type)


def _distributed(whole: Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """Made of parts that are cut here, and not by DTensor."""
    part = _part(whole, mesh, layout).contiguous()
    return DTensor.from_local(part, mesh, layout, run_check=False, shape=whole.shape, stride=whole.stride())


def _part(whole: Tensor, mesh: DeviceMesh, layout: Layout) -> Tensor:
    """This rank's: a chunk of each dimension that is sharded, of the chunk of the mesh's dimension before; of a sum the
    first rank has what the others have not, which is their number each."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    part = whole
    for placement, index, size in zip(layout, coordinate, (mesh.size(dim) for dim in range(mesh.ndim)), strict=True):
        if isinstance(placement, Shard):
            rows = -(-part.size(placement.dim) // size)
            begin = min(index * rows, part.size(placement.dim))
            part = part.narrow(placement.dim, begin, min(rows, part.size(placement.dim) - begin))
        elif isinstance(placement, Partial):
            part = part - sum(range(1, size)) if index == 0 else torch.full_like(part, index)
    return part.clone()


def _wrong(found: Tensor, expected: Tensor) -> int:
    """Elements that differ; all of them where the shape does."""
    if found.shape != expected.shape:
        return max(found.numel(), expected.numel(), 1)
    return int((found.detach() != expected.detach()).sum())
