"""Faults of clipping: the norm that is taken, the gradients that are scaled, and whether all ranks agree."""

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

from conformance.defects.injection import Defect, replaced_call
from conformance.instruments.sharding import local

Norm = Callable[[Sequence[Tensor], float], Tensor]
"""Function from gradients and the order of the norm to a scalar."""
Clip = Callable[..., Tensor]
"""Signature of `reference_trainer.clip.clip_gradients`."""
Clipping = Callable[[Clip, list[nn.Parameter], dict[str, Any]], Tensor]
"""Function from the original, the parameters that have gradients, and the options, to the norm."""


def clipping(clip: Clipping) -> AbstractContextManager[None]:
    """Let the trainer clip by `clip`."""

    def clip_gradients(original: Clip, parameters: Iterable[nn.Parameter], **options: Any) -> Tensor:
        return clip(original, [p for p in parameters if p.grad is not None], options)

    return replaced_call("reference_trainer.train", "clip_gradients", clip_gradients)


def clipping_by_norm(
    norm_of: Norm, *, logged: Norm | None = None, limit_factor: bool = True
) -> AbstractContextManager[None]:
    """Let the trainer clip by `norm_of(gradients, order)`, and log that norm or the `logged` one."""

    def clip(_original: Clip, parameters: list[nn.Parameter], options: dict[str, Any]) -> Tensor:
        gradients, order = _gradients(parameters), options["norm_type"]
        norm = norm_of(gradients, order)
        factor = options["max_norm"] / (norm + 1e-6)
        scale(gradients, factor.clamp(max=1.0) if limit_factor else factor)
        return logged(gradients, order) / factor.clamp(max=1.0) if logged else norm

    return clipping(clip)


def scale(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply this rank's shards of the gradients by a scalar, in place."""
    for grad in gradients:
        local(grad).mul_(factor)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _power(grad: Tensor, order: float) -> Tensor:
    """Return the sum of the p-th powers of this rank's shard, or its largest absolute value."""
    sizes = local(grad).abs()
    return sizes.max() if order == math.inf else sizes.pow(order).sum()


def _root(powers: Tensor, order: float) -> Tensor:
    return powers.max() if order == math.inf else powers.sum() ** (1.0 / order)


def local_norm(gradients: Sequence[Tensor], order: float) -> Tensor:
    """Return the norm of this rank's shards alone, a scalar."""
    return _root(torch.stack([_power(grad, order) for grad in gradients]), order)


def norm_over(
    *counted: str,
    op: dist.ReduceOp.RedOpType | None = None,
    root_of: Callable[[Tensor, float], Tensor] = _root,
    together: bool = True,
) -> Norm:
    """Return a norm of the full gradients of one mesh that counts copies on the `counted` mesh dimensions as shards.

    The norm reduces the powers of all gradients `together`, or gradient by gradient, with the operator `op` (default:
    the right one), and takes `root_of` of the result.
    """

    def norm_of(gradients: Sequence[Tensor], order: float) -> Tensor:
        is_maximum = order == math.inf
        dims_of = [_sharded_over(grad, counted) for grad in gradients]
        dims = dict.fromkeys(dim for own in dims_of for dim in own)
        powers = torch.stack([_power(grad, order) for grad in gradients])
        if is_maximum:
            powers = powers.max().view(1)
        else:
            copies = [math.prod(mesh.size(dim) for mesh, dim in dims.keys() - own) for own in dims_of]
            powers /= torch.tensor(copies)
        reduce_op = op or (dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM)
        for mesh, dim in dims:
            for sent in [powers] if together else powers.unbind():
                dist.all_reduce(sent, reduce_op, group=mesh.get_group(dim))
        return root_of(powers, order)

    return norm_of


def _sharded_over(grad: Tensor, counted: tuple[str, ...] = ()) -> dict[tuple[DeviceMesh, int], None]:
    """Return the mesh dimensions over which a gradient is sharded, or that are `counted`, in the mesh's order."""
    if not isinstance(grad, DTensor):
        return {}
    mesh = grad.device_mesh
    by_dim = enumerate(zip(mesh.mesh_dim_names or (), grad.placements, strict=True))
    return {
        (mesh, dim): None
        for dim, (name, placement) in by_dim
        if mesh.size(dim) > 1 and (not placement.is_replicate() or name in counted)
    }


_by_full_norm = partial(clipping_by_norm, norm_over())

CLIP_NORM_LOCAL = Defect(
    id="clip-norm-local",
    title="the gradient norm is that of the local shards",
    source="https://github.com/pytorch/pytorch/issues/170862",
    mechanism="clipping takes the norm over this rank's shards and forgets to reduce it",
    laws=("CLIP-1", "CLIP-2", "PAR-1", "PAR-5"),
    cells="id in (dp2-fp32-default-meta-sgd, dp2-fp32-default-meta-clip0.1)",
    inject=partial(clipping_by_norm, local_norm),
    inject_twin=_by_full_norm,
)
CLIP_NORM_OVER_REPLICAS = Defect(
    id="clip-norm-over-replicas",
    title="the gradient norm counts each replica of HSDP",
    source="https://github.com/ByteDance-Seed/VeOmni/pull/184",
    mechanism="the sum is taken over all data-parallel ranks, also over those that hold the same shards",
    laws=("CLIP-1",),
    cells="id = hsdp2x2-fp32-default-meta-integer-sgd-noclip-steps1",
    inject=partial(clipping_by_norm, norm_over("dp_replicate")),
    inject_twin=_by_full_norm,
)
CLIP_NORM_COUNTS_COPIES = Defect(
    id="clip-norm-counts-copies",
    title="the gradient norm counts parameters that tensor parallelism replicates once for each rank",
    source="https://github.com/NVIDIA-NeMo/RL/issues/3788",
    mechanism="the sum is taken over the tensor-parallel ranks for all parameters, sharded or not",
    laws=("CLIP-1",),
    cells="id = tp2-fp32-default-meta",
    inject=partial(clipping_by_norm, norm_over("tp")),
    inject_twin=_by_full_norm,
)
CLIP_NORM_LOGGED_LOCAL = Defect(
    id="clip-norm-logged-local",
    title="the norm that is logged is each rank's own",
    source="https://github.com/pytorch/pytorch/issues/166638",
    mechanism="gradients are scaled by the full norm, but item() is taken of one that is not reduced",
    laws=("CLIP-1",),
    cells="id = dp2-fp32-default-meta-clip0.1",
    inject=partial(clipping_by_norm, norm_over(), logged=local_norm),
    inject_twin=_by_full_norm,
)


def with_options(**changes: Any) -> Clipping:
    """Return a clipping with other options than those of the trainer."""

    def clip(original: Clip, parameters: list[nn.Parameter], options: dict[str, Any]) -> Tensor:
        return original(parameters, **options | changes)

    return clip


def from_generator(original: Clip, parameters: list[nn.Parameter], options: dict[str, Any]) -> Tensor:
    """Clip the parameters that a generator yields."""
    return original(iter(parameters), **options)


CLIP_NORM_TYPE_IGNORED = Defect(
    id="clip-norm-type-ignored",
    title="the 2-norm is taken whatever the configuration says",
    source="https://github.com/pytorch/torchtitan/pull/649",
    mechanism="norm_type is not passed on",
    laws=("CLIP-1", "CLIP-2"),
    cells="id in (dp2-fp32-default-meta-norm1, "
    "dp2-bf16reduce-table-full-uneven-clip0.1-norm3-fpre1-bpre2-offloadcpu-acfull-tied)",
    inject=partial(clipping, with_options(norm_type=2.0)),
    inject_twin=partial(clipping, from_generator),
)


def root_as_if_finite(powers: Tensor, order: float) -> Tensor:
    """Return the p-th root also of a maximum, for which p is infinite: always 1."""
    return powers.sum() ** (1.0 / order)


INF_NORM_WRONG_ROOT = Defect(
    id="inf-norm-wrong-root",
    title="the inf-norm is always 1",
    source="https://github.com/meta-pytorch/torchrec/pull/3199",
    mechanism="the p-th root is taken of a maximum, with an infinite p",
    laws=("CLIP-1", "CLIP-2"),
    cells="id = dp2-fp32-default-meta-norminf",
    inject=partial(clipping_by_norm, norm_over(root_of=root_as_if_finite)),
    inject_twin=_by_full_norm,
)
INF_NORM_SUMMED = Defect(
    id="inf-norm-summed",
    title="the inf-norm is the sum of the ranks' maxima",
    source="https://github.com/meta-pytorch/torchrec/pull/3199",
    mechanism="the reduction of a p-norm is used for a maximum",
    laws=("CLIP-1", "CLIP-2"),
    cells="id = dp2-fp32-default-meta-norminf or norm_type = inf and clip = 0.1 and compile = false and world <= 4",
    inject=partial(clipping_by_norm, norm_over(op=dist.ReduceOp.SUM)),
    inject_twin=_by_full_norm,
)


def group_by_group(key_of: Callable[[nn.Parameter], object]) -> Clipping:
    """Return a clipping of the parameters of each key on their own; the norm is that of the last group."""

    def clip(original: Clip, parameters: list[nn.Parameter], options: dict[str, Any]) -> Tensor:
        groups: dict[object, list[nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault(key_of(parameter), []).append(parameter)
        return [original(group, **options) for group in groups.values()][-1]

    return clip


def same_group(_parameter: nn.Parameter) -> object:
    """Return the key of a group that has all parameters."""
    return 0


CLIP_PER_PARAMETER = Defect(
    id="clip-per-parameter",
    title="each parameter is clipped by its own norm",
    source="https://github.com/meta-pytorch/torchtune/issues/2420",
    mechanism="parameters that cannot be clipped together are clipped one by one",
    laws=("CLIP-1", "CLIP-2"),
    cells="id = dp2-fp32-default-meta-clip0.1",
    inject=partial(clipping, group_by_group(id)),
    inject_twin=partial(clipping, group_by_group(same_group)),
)


def mesh_of(parameter: nn.Parameter) -> object:
    """Return the mesh of a parameter's gradient, None for a plain tensor."""
    return parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None


CLIP_MIXED_MESH = Defect(
    id="clip-mixed-mesh",
    title="the parameters of each mesh are clipped on their own",
    source="https://github.com/meta-pytorch/torchtune/issues/2420",
    mechanism="gradients of two meshes cannot be stacked, so clip_grad_norm_ is called for each mesh",
    laws=("CLIP-1", "CLIP-2"),
    cells="mesh = dp2-tp2 and norms_in_tp = false and clip > 0 and compile = false and saved_on = none",
    inject=partial(clipping, group_by_group(mesh_of)),
    inject_twin=partial(clipping, group_by_group(same_group)),
)
CLIP_FORGOTTEN = Defect(
    id="clip-forgotten",
    title="gradients are not clipped",
    source="https://github.com/axolotl-ai-cloud/axolotl/issues/3058",
    mechanism="the norm is taken and logged, but nothing is scaled",
    laws=("CLIP-2", "PAR-1"),
    cells="id in (dp2-fp32-default-meta-sgd, dp2-fp32-default-meta-clip0.1)",
    inject=partial(clipping, with_options(max_norm=0.0)),
    inject_twin=partial(clipping, from_generator),
)


def exhausted(original: Clip, parameters: list[nn.Parameter], options: dict[str, Any]) -> Tensor:
    """Clip the parameters that a generator yields after somebody else has looped over it."""
    generator = iter(parameters)
    list(generator)  # as a log of their names would
    return original(generator, **options)


CLIP_EXHAUSTED_GENERATOR = Defect(
    id="clip-exhausted-generator",
    title="an exhausted generator of parameters is clipped",
    source="https://github.com/pytorch/pytorch/issues/148259",
    mechanism="parameters() was looped over before, clipping finds none of them",
    laws=("CLIP-1", "CLIP-2"),
    cells="id = dp2-fp32-default-meta-clip0.1",
    inject=partial(clipping, exhausted),
    inject_twin=partial(clipping, from_generator),
)
CLIP_SCALES_UP = Defect(
    id="clip-scales-up",
    title="small gradients are scaled up to the limit",
    source="https://github.com/pytorch/pytorch/pull/73405",
    mechanism="the factor is not limited to 1",
    laws=("CLIP-2",),
    cells="id in (dp2-fp32-default-meta-clip1000.0, "
    "dp2-bf16mixed-exceptlast-layerwise-uneven-clip1000.0-norm1-cliploop-bpre2-offloadcpu-acfull)",
    inject=partial(clipping_by_norm, norm_over(), limit_factor=False),
    inject_twin=_by_full_norm,
)
CLIP_REDUCES_EACH_PARAMETER = Defect(
    id="clip-reduces-each-parameter",
    title="the norm of each parameter is reduced on its own",
    source="https://github.com/pytorch/pytorch/pull/172620",
    mechanism="the reduction is inside of the loop over parameters: as many collectives as parameters",
    laws=("CLIP-5", "MP-4"),
    cells="id in (dp2-fp32-default-meta, dp2-fp32-default-meta-clip0.1)",
    inject=partial(clipping_by_norm, norm_over(together=False)),
    inject_twin=partial(clipping, from_generator),
)


def reduced_in_order(*, of_ranks: bool) -> AbstractContextManager[None]:
    """Reduce the norm over the mesh dimensions in an order that all ranks share, or in each rank's own order."""

    def clip(_original: Clip, parameters: list[nn.Parameter], options: dict[str, Any]) -> Tensor:
        gradients = _gradients(parameters)
        dims = list(dict.fromkeys(dim for grad in gradients for dim in _sharded_over(grad)))
        if of_ranks and dist.get_rank() not in (0, dist.get_world_size() - 1):
            dims.reverse()
        largest = local_norm(gradients, math.inf)
        for mesh, dim in dims:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        scale(gradients, (options["max_norm"] / (largest + 1e-6)).clamp(max=1.0))
        return largest

    return clipping(clip)


CLIP_ORDER_OF_RANKS = Defect(
    id="clip-order-of-ranks",
    title="ranks reduce the norm over the mesh dimensions in different orders",
    source="https://github.com/NVIDIA/apex/issues/19",
    mechanism="groups are taken from a set, whose order differs between processes: ranks wait for each other forever",
    laws=("CLIP-1", "CLIP-2", "CLIP-5"),
    cells="id = dp2-tp2-fp32-default-meta-norminf",
    inject=partial(reduced_in_order, of_ranks=True),
    inject_twin=partial(reduced_in_order, of_ranks=False),
    hangs=True,
)


def largest_element(*, nan_as: float) -> AbstractContextManager[None]:
    """Take the maximum over the ranks of what is left when `nan_as` replaces each NaN."""

    def largest(_original: object, gradients: list[Tensor], _mesh: DeviceMesh | None, *, foreach: bool) -> Tensor:
        value = local_norm(gradients, math.inf).nan_to_num(nan=nan_as, posinf=math.inf)
        for mesh, dim in _sharded_over(gradients[0]):
            dist.all_reduce(value, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        return value

    return replaced_call("reference_trainer.clip", "_largest", largest)


INF_NORM_LOSES_NAN = Defect(
    id="inf-norm-loses-nan",
    title="the inf-norm of gradients with a NaN is a number",
    source="https://github.com/ml-explore/mlx/issues/4072",
    mechanism="the maximum over the ranks drops a NaN, depending on which of them has it",
    laws=("CLIP-3",),
    cells="id in (dp2-fp32-default-meta-norminf, dp2-tp2-fp32-default-meta-norminf)",
    inject=partial(largest_element, nan_as=math.nan),
    inject_twin=partial(largest_element, nan_as=math.inf),
)


def finite_check(*, agreed: bool) -> AbstractContextManager[None]:
    """Raise an error if the norm is not finite on any rank, or only if it is not on this rank."""

    def require_finite(_original: object, norm: Tensor) -> None:
        bad = (~norm.isfinite()).float()
        if agreed:
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        if bad:
            raise RuntimeError("the gradient norm is not finite")

    return replaced_call("reference_trainer.clip", "_require_finite", require_finite)


CLIP_ERROR_ON_ONE_REPLICA = Defect(
    id="clip-error-on-one-replica",
    title="only the ranks that hold a non-finite gradient raise an error",
    source="https://github.com/pytorch/pytorch/issues/170862",
    mechanism="error_if_nonfinite looks at the rank's norm, which the ranks of another replica do not share",
    laws=("CLIP-3",),
    cells="id = hsdp2x2-fp32-default-meta",
    inject=partial(finite_check, agreed=False),
    inject_twin=partial(finite_check, agreed=True),
)
