"""Gradient clipping by a norm over all meshes, equal on every rank.

torch.nn.utils.clip_grad_norm_ is not enough. In torch 2.13 it refuses gradients of several meshes, and DTensors mixed
with plain tensors. Its inf-norm is each rank's own (https://github.com/pytorch/pytorch/issues/166638), raises on ranks
that have an empty shard (https://github.com/meta-pytorch/torchrec/pull/3891), and loses a NaN: the maximum that gloo
takes of NaN and a number depends on their order.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


class NonFiniteGradientsError(RuntimeError):
    """Total norm of the gradients that is not finite on some rank; every rank of the world raises this error."""


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    *,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool = True,
    over_stages: Callable[[Tensor], list[Tensor]] = lambda norm: [norm],
) -> Tensor:
    """Scale all gradients down to a total norm of `max_norm` (0: leave them), and return the norm before.

    Gradients may be DTensors, of one mesh or of several, and plain tensors, which must be equal on all ranks. The norm
    is a plain scalar. With `error_if_nonfinite`, raises NonFiniteGradientsError on all ranks of the world, before
    anything is scaled, if the norm is not finite on any. `over_stages` returns, for the norm of this rank's stages of a
    pipeline, those of all stages.
    """
    meshes = _by_mesh([p for p in parameters if p.grad is not None])
    norms = [
        _norm([p.grad for p in same_mesh if p.grad is not None], mesh, norm_type=norm_type, foreach=foreach)
        for mesh, same_mesh in meshes.items()
    ]
    norm = _norm_of_norms(over_stages(_norm_of_norms(norms, norm_type=norm_type)), norm_type=norm_type)
    if error_if_nonfinite:
        _require_finite(norm)
    if max_norm > 0:
        for same_mesh in meshes.values():
            clip_grads_with_norm_(same_mesh, max_norm, norm, foreach=foreach)
    return norm


def _by_mesh(parameters: list[nn.Parameter]) -> dict[DeviceMesh | None, list[nn.Parameter]]:
    """Parameters by the mesh of their gradients, None for plain tensors; in the same order on every rank."""
    meshes: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
        meshes.setdefault(mesh, []).append(parameter)
    return meshes


def _norm(gradients: list[Tensor], mesh: DeviceMesh | None, *, norm_type: float, foreach: bool) -> Tensor:
    """Norm of the full gradients of one mesh: each element counts once, however many ranks hold it."""
    if norm_type == math.inf:
        return _largest(gradients, mesh, foreach=foreach)
    norm = get_total_norm(gradients, norm_type, foreach=foreach)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _largest(gradients: list[Tensor], mesh: DeviceMesh | None, *, foreach: bool) -> Tensor:
    """Largest absolute value of the full gradients of one mesh; infinite if there is a NaN."""
    shards = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
    not_empty = [shard for shard in shards if shard.numel()]
    largest = get_total_norm(not_empty, math.inf, foreach=foreach) if not_empty else shards[0].new_zeros(())
    largest = largest.where(~largest.isnan(), math.inf)
    for dim in range(mesh.ndim if mesh else 0):
        # Not `is_shard`, which is False for a dimension that two mesh dimensions shard (experts).
        sharded = any(isinstance(grad, DTensor) and not grad.placements[dim].is_replicate() for grad in gradients)
        if mesh and mesh.size(dim) > 1 and sharded:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return largest


def _norm_of_norms(norms: list[Tensor], *, norm_type: float) -> Tensor:
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())


def _require_finite(norm: Tensor) -> None:
    """Raise NonFiniteGradientsError on every rank of the world, or on none.

    A number that is not finite on one rank is not in the norm of ranks that hold copies (replicas, replicated
    parameters): a rank that raised alone would leave these waiting.
    """
    finite = norm.isfinite().to(torch.int32)
    dist.all_reduce(finite, dist.ReduceOp.MIN)
    if not finite:
        raise NonFiniteGradientsError(
            f"gradients are not finite: their norm is {float(norm)} on rank {dist.get_rank()}. Nothing was changed; "
            "lower optimizer.lr, or set optimizer.error_if_nonfinite=false to go on with what they are"
        )
