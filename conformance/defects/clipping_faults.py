"""Faults of clipping: by which norm, what is scaled, and whether all ranks agree."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from conformance.defects.injection import Defect, replaced
from conformance.instruments.sharding import local

Norm = Callable[[Sequence[Tensor], float], Tensor]
"""From gradients and the order of the norm to a scalar."""
Clip = Callable[..., Tensor]
"""Signature of `reference_trainer.clip.clip_gradients`."""
Clipping = Callable[[Clip, list[nn.Parameter], dict[str, Any]], Tensor]
"""From the original, the parameters that have gradients, and the options."""


def wrapped(clip: Clipping) -> AbstractContextManager[None]:
    """Clip by this function."""

    def make(original: Clip) -> Clip:
        def clip_gradients(parameters: Iterable[nn.Parameter], **options: Any) -> Tensor:
            return clip(original, [p for p in parameters if p.grad is not None], options)

        return clip_gradients

    return replaced("reference_trainer.train", "clip_gradients", make)


def by_hand(norm_of: Norm, *, logged: Norm | None = None, limit_factor: bool = True) -> AbstractContextManager[None]:
    """Clip with a norm that is computed here, and return that or the `logged` one."""

    def clip(_original: Clip, parameters: list[nn.Parameter], options: dict[str, Any]) -> Tensor:
        gradients, order = _gradients(parameters), options["norm_type"]
        norm = norm_of(gradients, order)
        factor = options["max_norm"] / (norm + 1e-6)
        scale(gradients, factor.clamp(max=1.0) if limit_factor else factor)
        return logged(gradients, order) / factor.clamp(max=1.0) if logged else norm

    return wrapped(clip)


def scale(gradients: Iterable[Tensor], factor: Tensor) -> None:
    for grad in gradients:
        local(grad).mul_(factor)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def power(grad: Tensor, order: float) -> Tensor:
    """Sum of the p-th powers of this rank's part, or its largest size."""
    sizes = local(grad).abs()
    return sizes.max() if order == math.inf else sizes.pow(order).sum()


def root(powers: Tensor, order: float) -> Tensor:
    return powers.max() if order == math.inf else powers.sum() ** (1.0 / order)


def local_norm(gradients: Sequence[Tensor], order: float) -> Tensor:
    """The norm of this rank's parts alone."""
    return root(torch.stack([power(grad, order) for grad in gradients]), order)


def norm_over(
    *counted: str,
    op: dist.ReduceOp.RedOpType | None = None,
    root_of: Callable[[Tensor, float], Tensor] = root,
    together: bool = True,
) -> Norm:
    """The norm of the full gradients of one mesh. Copies of the `counted` mesh dimensions count as different parts."""

    def norm_of(gradients: Sequence[Tensor], order: float) -> Tensor:
        largest = order == math.inf
        divided = [_divided_over(grad, counted) for grad in gradients]
        dims = dict.fromkeys(dim for dims in divided for dim in dims)
        powers = torch.stack([power(grad, order) for grad in gradients])
        if largest:
            powers = powers.max().view(1)
        else:
            copies = [math.prod(mesh.size(dim) for mesh, dim in dims.keys() - own) for own in divided]
            powers /= torch.tensor(copies)
        reduce_op = op or (dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        for mesh, dim in dims:
            for sent in [powers] if together else powers.unbind():
                dist.all_reduce(sent, reduce_op, group=mesh.get_group(dim))
        return root_of(powers, order)

    return norm_of


def _divided_over(grad: Tensor, counted: tuple[str, ...] = ()) -> dict[tuple[DeviceMesh, int], None]:
    """Dimensions of the mesh, in its order, on which ranks hold different parts."""
    if not isinstance(grad, DTensor):
        return {}
    mesh = grad.device_mesh
    by_dim = enumerate(zip(mesh.mesh_dim_names or (), grad.placements, strict=True))
    return {
        (mesh, dim): None
        for dim, (name, placement) in by_dim
        if mesh.size(dim) > 1 and (not placement.is_replicate() or name in counted)
    }


def root_as_if_finite(powers: Tensor, order: float) -> Tensor:
    """The p-th root also of a maximum, for which p is infinite: always 1."""
    return powers.sum() ** (1.0 / order)


def each_alone(
    key_of: Callable[[nn.Parameter], object],
) -> Callable[[Clip, list[nn.Parameter], dict[str, Any]], Tensor]:
    """Clip the parameters of each key by themselves; the norm is that of the last."""

    def clip(original: Clip, parameters: list[nn.Parameter], options: dict[str, Any]) -> Tensor:
        groups: dict[object, list[nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault(key_of(parameter), []).append(parameter)
        return [original(group, **options) for group in groups.values()][-1]

    return clip


def mesh_of(parameter: nn.Parameter) -> object:
    return parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None


def with_options(**changes: Any) -> Clipping:
    """Clip with other options than the trainer asks for."""

    def clip(original: Clip, parameters: list[nn.Parameter], options: dict[str, Any]) -> Tensor:
        return original(parameters, **options | changes)

    return clip


def exhausted(original: Clip, parameters: list[nn.Parameter], options: dict[str, Any]) -> Tensor:
    generator = iter(parameters)
    list(generator)  # as a log of their names would
    return original(generator, **options)


def from_generator(original: Clip, parameters: list[nn.Parameter], options: dict[str, Any]) -> Tensor:
    return original(iter(parameters), **options)


def reduced_in_order(*, of_ranks: bool) -> AbstractContextManager[None]:
    """Take the norm with the mesh dimensions in an order that the rank decides: one that they share, or its own."""

    def clip(_original: Clip, parameters: list[nn.Parameter], options: dict[str, Any]) -> Tensor:
        gradients = _gradients(parameters)
        dims = list(dict.fromkeys(dim for grad in gradients for dim in _divided_over(grad)))
        first, last = dist.get_rank(), dist.get_world_size() - 1
        if of_ranks and first not in (0, last):
            dims.reverse()
        largest = local_norm(gradients, math.inf)
        for mesh, dim in dims:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        scale(gradients, (options["max_norm"] / (largest + 1e-6)).clamp(max=1.0))
        return largest

    return wrapped(clip)


def largest_element(*, of_nan: float) -> AbstractContextManager[None]:
    """Take the maximum over the ranks with NaN replaced, or kept."""

    def make(_original: Any) -> Any:
        def largest(gradients: list[Tensor], _mesh: DeviceMesh | None, *, foreach: bool) -> Tensor:
            value = local_norm(gradients, math.inf).nan_to_num(nan=of_nan, posinf=math.inf)
            for mesh, dim in _divided_over(gradients[0]):
                dist.all_reduce(value, dist.ReduceOp.MAX, group=mesh.get_group(dim))
            return value

        return largest

    return replaced("reference_trainer.clip", "_largest", make)


def finite_check(*, agreed: bool) -> AbstractContextManager[None]:
    """Raise where the norm is not finite: on this rank, or on any."""

    def make(_original: Any) -> Any:
        def require_finite(norm: Tensor) -> None:
            bad = (~norm.isfinite()).float()
            if agreed:
                dist.all_reduce(bad, dist.ReduceOp.MAX)
            if bad:
                raise RuntimeError("the gradient norm is not finite")

        return require_finite

    return replaced("reference_trainer.clip", "_require_finite", make)


_FULL = partial(by_hand, norm_over())

DEFECTS: tuple[Defect, ...] = (
    Defect(
        id="clip-norm-local",
        title="the gradient norm is that of the local shards",
        source="https://github.com/pytorch/pytorch/issues/170862",
        mechanism="clipping by hand takes the norm over this rank's shards and forgets to reduce it",
        laws=("CLIP-1", "CLIP-2", "PAR-1", "PAR-5"),
        inject=partial(by_hand, local_norm),
        inject_twin=_FULL,
    ),
    Defect(
        id="clip-norm-over-replicas",
        title="the gradient norm counts each replica of HSDP",
        source="https://github.com/ByteDance-Seed/VeOmni/pull/184",
        mechanism="the sum is taken over all data-parallel ranks, also over those that hold the same shards",
        laws=("CLIP-1",),
        inject=partial(by_hand, norm_over("dp_replicate")),
        inject_twin=_FULL,
    ),
    Defect(
        id="clip-norm-counts-copies",
        title="the gradient norm counts parameters that tensor parallelism replicates once for each rank",
        source="https://github.com/NVIDIA-NeMo/RL/issues/3788",
        mechanism="the sum is taken over the tensor-parallel ranks for all parameters, divided or not",
        laws=("CLIP-1",),
        inject=partial(by_hand, norm_over("tp")),
        inject_twin=_FULL,
    ),
    Defect(
        id="clip-norm-logged-local",
        title="the norm that is logged is each rank's own",
        source="https://github.com/pytorch/pytorch/issues/166638",
        mechanism="gradients are scaled by the full norm, but item() is taken of one that is not reduced",
        laws=("CLIP-1",),
        inject=partial(by_hand, norm_over(), logged=local_norm),
        inject_twin=_FULL,
    ),
    Defect(
        id="clip-norm-type-ignored",
        title="the 2-norm is taken whatever was asked for",
        source="https://github.com/pytorch/torchtitan/pull/649",
        mechanism="norm_type is not handed on",
        laws=("CLIP-1", "CLIP-2"),
        inject=partial(wrapped, with_options(norm_type=2.0)),
        inject_twin=partial(wrapped, from_generator),
    ),
    Defect(
        id="inf-norm-wrong-root",
        title="the inf-norm is always 1",
        source="https://github.com/meta-pytorch/torchrec/pull/3199",
        mechanism="the p-th root is taken of a maximum, with an infinite p",
        laws=("CLIP-1", "CLIP-2"),
        inject=partial(by_hand, norm_over(root_of=root_as_if_finite)),
        inject_twin=_FULL,
    ),
    Defect(
        id="inf-norm-summed",
        title="the inf-norm is the sum of the ranks' maxima",
        source="https://github.com/meta-pytorch/torchrec/pull/3199",
        mechanism="the reduction of a p-norm is used for a maximum",
        laws=("CLIP-1", "CLIP-2"),
        inject=partial(by_hand, norm_over(op=dist.ReduceOp.SUM)),
        inject_twin=_FULL,
    ),
    Defect(
        id="clip-per-parameter",
        title="each parameter is clipped by its own norm",
        source="https://github.com/meta-pytorch/torchtune/issues/2420",
        mechanism="parameters that cannot be clipped together are clipped one by one",
        laws=("CLIP-1", "CLIP-2"),
        inject=partial(wrapped, each_alone(id)),
        inject_twin=partial(wrapped, each_alone(lambda _parameter: 0)),
    ),
    Defect(
        id="clip-mixed-mesh",
        title="the parameters of each mesh are clipped by themselves",
        source="https://github.com/meta-pytorch/torchtune/issues/2420",
        mechanism="gradients of two meshes cannot be stacked, so clip_grad_norm_ is called for each mesh",
        laws=("CLIP-1", "CLIP-2"),
        inject=partial(wrapped, each_alone(mesh_of)),
        inject_twin=partial(wrapped, each_alone(lambda _parameter: 0)),
    ),
    Defect(
        id="clip-forgotten",
        title="gradients are not clipped",
        source="https://github.com/axolotl-ai-cloud/axolotl/issues/3058",
        mechanism="the norm is taken and logged, but nothing is scaled",
        laws=("CLIP-2", "PAR-1"),
        inject=partial(wrapped, with_options(max_norm=0.0)),
        inject_twin=partial(wrapped, from_generator),
    ),
    Defect(
        id="clip-exhausted-generator",
        title="an exhausted generator of parameters is clipped",
        source="https://github.com/pytorch/pytorch/issues/148259",
        mechanism="parameters() was looped over before, clipping finds none of them",
        laws=("CLIP-1", "CLIP-2"),
        inject=partial(wrapped, exhausted),
        inject_twin=partial(wrapped, from_generator),
    ),
    Defect(
        id="clip-scales-up",
        title="small gradients are scaled up to the limit",
        source="https://github.com/pytorch/pytorch/pull/73405",
        mechanism="the factor is not limited to 1",
        laws=("CLIP-2",),
        inject=partial(by_hand, norm_over(), limit_factor=False),
        inject_twin=_FULL,
    ),
    Defect(
        id="clip-reduces-each-parameter",
        title="the norm of each parameter is reduced by itself",
        source="https://github.com/pytorch/pytorch/pull/172620",
        mechanism="the reduction is inside of the loop over parameters: as many collectives as parameters",
        laws=("CLIP-5", "MP-4"),
        inject=partial(by_hand, norm_over(together=False)),
        inject_twin=partial(wrapped, from_generator),
    ),
    Defect(
        id="clip-order-of-ranks",
        title="ranks reduce the norm over the dimensions of the mesh in different orders",
        source="https://github.com/NVIDIA/apex/issues/19",
        mechanism="groups are taken from a set, whose order each process has of its own: they wait in a circle",
        laws=("CLIP-1", "CLIP-2", "CLIP-5"),
        inject=partial(reduced_in_order, of_ranks=True),
        inject_twin=partial(reduced_in_order, of_ranks=False),
        hangs=True,
    ),
    Defect(
        id="inf-norm-loses-nan",
        title="the inf-norm of gradients with a NaN is a number",
        source="https://github.com/ml-explore/mlx/issues/4072",
        mechanism="the maximum over the ranks drops a NaN, depending on which of them has it",
        laws=("CLIP-3",),
        inject=partial(largest_element, of_nan=math.nan),
        inject_twin=partial(largest_element, of_nan=math.inf),
    ),
    Defect(
        id="clip-error-on-one-replica",
        title="only the ranks that hold a bad number raise an error",
        source="https://github.com/pytorch/pytorch/issues/170862",
        mechanism="error_if_nonfinite looks at the rank's norm, which the ranks of another replica do not share",
        laws=("CLIP-3",),
        inject=partial(finite_check, agreed=False),
        inject_twin=partial(finite_check, agreed=True),
    ),
)
