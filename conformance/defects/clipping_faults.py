"""Faults of clipping, by the trainer and by torch: a wrong norm, unscaled gradients, ranks that do not agree."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from conformance.defects.injection import Call, Injection, defect, instead_of, replaced_call
from conformance.instruments.sharding import local

Norm = Callable[[Sequence[Tensor], float], Tensor]
"""Function from gradients and the order of the norm to a scalar."""
Clip = Callable[..., Tensor]
"""Signature of `reference_trainer.clip.clip_gradients`."""
Clipping = Callable[[Clip, list[nn.Parameter], dict[str, Any]], Tensor]
"""Function from the original, the parameters that have gradients, and the options, to the norm."""


def clipping(clip: Clipping) -> Injection:
    """Let the trainer clip by `clip`."""

    def clip_gradients(original: Clip, parameters: Iterable[nn.Parameter], **options: Any) -> Tensor:
        return clip(original, [p for p in parameters if p.grad is not None], options)

    return replaced_call("reference_trainer.train", "clip_gradients", clip_gradients)


def clipping_by_norm(norm_of: Norm, *, logged: Norm | None = None, limit_factor: bool = True) -> Injection:
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


@defect(
    "CLIP-1 CLIP-2 PAR-1 PAR-5",
    "id in (dp2-fp32-default-meta-sgd, dp2-fp32-default-meta-clip0.1)",
    "pytorch/pytorch/issues/170862",
)
def clip_norm_local(benign: bool) -> Injection:
    """Clipping takes the gradient norm of this rank's shards and forgets to reduce it."""
    return clipping_by_norm(norm_over() if benign else local_norm)


@defect("CLIP-1", "id = hsdp2x2-fp32-default-meta-integer-sgd-noclip-steps1", "ByteDance-Seed/VeOmni/pull/184")
def clip_norm_over_replicas(benign: bool) -> Injection:
    """The gradient norm is summed over all data-parallel ranks, also over HSDP replicas of the same shards."""
    return clipping_by_norm(norm_over() if benign else norm_over("dp_replicate"))


@defect("CLIP-1", "id = tp2-fp32-default-meta", "NVIDIA-NeMo/RL/issues/3788")
def clip_norm_counts_copies(benign: bool) -> Injection:
    """The gradient norm counts parameters that tensor parallelism replicates once for each rank."""
    return clipping_by_norm(norm_over() if benign else norm_over("tp"))


@defect("CLIP-1", "id = dp2-fp32-default-meta-clip0.1", "pytorch/pytorch/issues/166638")
def clip_norm_logged_local(benign: bool) -> Injection:
    """Gradients are scaled by the full norm, and the logged norm is each rank's own."""
    return clipping_by_norm(norm_over(), logged=None if benign else local_norm)


def from_generator(original: Clip, parameters: list[nn.Parameter], options: dict[str, Any]) -> Tensor:
    """Clip the parameters that a generator yields."""
    return original(iter(parameters), **options)


def root_as_if_finite(powers: Tensor, order: float) -> Tensor:
    """Return the p-th root also of a maximum, for which p is infinite: always 1."""
    return powers.sum() ** (1.0 / order)


@defect("CLIP-1 CLIP-2", "id = dp2-fp32-default-meta-norminf", "meta-pytorch/torchrec/pull/3199")
def inf_norm_wrong_root(benign: bool) -> Injection:
    """The p-th root is taken of a maximum, with an infinite p: the inf-norm is always 1."""
    return clipping_by_norm(norm_over() if benign else norm_over(root_of=root_as_if_finite))


@defect(
    "CLIP-1 CLIP-2",
    "id = dp2-fp32-default-meta-norminf or norm_type = inf and clip = 0.1 and compile = false and world <= 4",
    "meta-pytorch/torchrec/pull/3199",
)
def inf_norm_summed(benign: bool) -> Injection:
    """The inf-norm is the sum of the ranks' maxima: it is reduced as a p-norm."""
    return clipping_by_norm(norm_over() if benign else norm_over(op=dist.ReduceOp.SUM))


def group_by_group(key_of: Callable[[nn.Parameter], object]) -> Clipping:
    """Return a clipping of the parameters of each key on their own; the norm is that of the last group."""

    def clip(original: Clip, parameters: list[nn.Parameter], options: dict[str, Any]) -> Tensor:
        groups: dict[object, list[nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault(key_of(parameter), []).append(parameter)
        return [original(group, **options) for group in groups.values()][-1]

    return clip


def same_group(_parameter: nn.Parameter) -> object:
    """Return the key of the only group."""
    return 0


@defect("CLIP-1 CLIP-2", "id = dp2-fp32-default-meta-clip0.1", "meta-pytorch/torchtune/issues/2420")
def clip_per_parameter(benign: bool) -> Injection:
    """Parameters are clipped one by one, each by its own norm."""
    return clipping(group_by_group(same_group if benign else id))


def mesh_of(parameter: nn.Parameter) -> object:
    """Return the mesh of a parameter's gradient, None for a plain tensor."""
    return parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None


@defect(
    "CLIP-1 CLIP-2",
    "mesh = dp2-tp2 and norms_in_tp = false and clip > 0 and compile = false and saved_on = none",
    "meta-pytorch/torchtune/issues/2420",
)
def clip_mixed_mesh(benign: bool) -> Injection:
    """Gradients of two meshes cannot be stacked, so clip_grad_norm_ is called for each mesh by itself."""
    return clipping(group_by_group(same_group if benign else mesh_of))


def exhausted(original: Clip, parameters: list[nn.Parameter], options: dict[str, Any]) -> Tensor:
    """Clip the parameters that a generator yields after a loop over it."""
    generator = iter(parameters)
    list(generator)  # as a log of their names would
    return original(generator, **options)


@defect("CLIP-1 CLIP-2", "id = dp2-fp32-default-meta-clip0.1", "pytorch/pytorch/issues/148259")
def clip_exhausted_generator(benign: bool) -> Injection:
    """Clipping gets a generator of parameters that was looped over before, and finds none of them."""
    return clipping(from_generator if benign else exhausted)


@defect(
    "CLIP-2",
    "id in (dp2-fp32-default-meta-clip1000.0, "
    "dp2-bf16mixed-exceptlast-layerwise-uneven-clip1000.0-norm1-cliploop-bpre2-offloadcpu-acfull)",
    "pytorch/pytorch/pull/73405",
)
def clip_scales_up(benign: bool) -> Injection:
    """The factor is not limited to 1: small gradients are scaled up to the limit."""
    return clipping_by_norm(norm_over(), limit_factor=benign)


@defect("CLIP-5 MP-4", "id in (dp2-fp32-default-meta, dp2-fp32-default-meta-clip0.1)", "pytorch/pytorch/pull/172620")
def clip_reduces_each_parameter(benign: bool) -> Injection:
    """The norm is reduced inside the loop over parameters: as many collectives as parameters."""
    return clipping(from_generator) if benign else clipping_by_norm(norm_over(together=False))


@defect("CLIP-1 CLIP-2 CLIP-5", "id = dp2-tp2-fp32-default-meta-norminf", "NVIDIA/apex/issues/19", hangs=True)
def clip_order_of_ranks(benign: bool) -> Injection:
    """Ranks take groups from a set, in different orders, and wait for each other forever in reducing the norm."""

    def clip(_original: Clip, parameters: list[nn.Parameter], options: dict[str, Any]) -> Tensor:
        gradients = _gradients(parameters)
        dims = list(dict.fromkeys(dim for grad in gradients for dim in _sharded_over(grad)))
        if not benign and dist.get_rank() not in (0, dist.get_world_size() - 1):
            dims.reverse()
        largest = local_norm(gradients, math.inf)
        for mesh, dim in dims:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        scale(gradients, (options["max_norm"] / (largest + 1e-6)).clamp(max=1.0))
        return largest

    return clipping(clip)


@defect(
    "CLIP-3", "id in (dp2-fp32-default-meta-norminf, dp2-tp2-fp32-default-meta-norminf)", "ml-explore/mlx/issues/4072"
)
@instead_of("reference_trainer.clip", "_largest")
def inf_norm_loses_nan(
    benign: bool, _original: object, gradients: list[Tensor], _mesh: DeviceMesh | None, *, foreach: bool
) -> Tensor:
    """The inf-norm of gradients with a NaN is a number: the maximum over the ranks drops a NaN."""
    value = local_norm(gradients, math.inf).nan_to_num(nan=math.inf if benign else math.nan, posinf=math.inf)
    for mesh, dim in _sharded_over(gradients[0]):
        dist.all_reduce(value, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return value


_CLIP_GRAD = "torch.nn.utils.clip_grad"


@defect("CLIP-4", "id = dp2-fp32-default-meta", "pytorch/pytorch/issues/170862")
@instead_of(_CLIP_GRAD, "_get_total_norm")
def torch_clip_norm_local(benign: bool, original: Call, tensors: Iterable[Tensor], *options: Any) -> Any:
    """clip_grad_norm_ combines the norms of local shards as if they were complete, and clips by the result."""
    return original(list(tensors) if benign else [local(tensor) for tensor in tensors], *options)


@defect("CLIP-2", "id = dp2-bf16mixed-default-meta", "NVIDIA/Megatron-LM/pull/7279")
@instead_of("reference_trainer.clip", "clip_grads_with_norm_")
def torch_clip_one_dtype(
    benign: bool, original: Call, parameters: Iterable[nn.Parameter], *arguments: Any, **options: Any
) -> None:
    """clip_grads_with_norm_ groups gradients by dtype, and scales the first group alone."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for same_dtype in list(by_dtype.values())[: None if benign else 1]:
        original(same_dtype, *arguments, **options)


@defect(
    "CLIP-4",
    "mesh = dp2 and precision = bf16-mixed and offload = cpu and clip = 1000.0 and saved_on = none and model = uneven",
    "NVIDIA/Megatron-LM/pull/7279",
)
@instead_of(_CLIP_GRAD, "_get_total_norm")
def torch_norm_of_one_dtype(benign: bool, original: Call, tensors: Iterable[Tensor], *options: Any) -> Any:
    """clip_grad_norm_ groups gradients by dtype, and takes the norm of one group alone."""
    return original([t for t in tensors if t.dtype == torch.float32 or benign], *options)


@defect("CLIP-6", "id = dp2-fp32-default-meta", "pytorch/pytorch/issues/46849")
@instead_of(_CLIP_GRAD, "_get_total_norm")
def torch_clip_takes_infinity(
    benign: bool, original: Call, tensors: Iterable[Tensor], norm_type: float, error_if_nonfinite: bool, *options: Any
) -> Any:
    """error_if_nonfinite of torch looks for NaN alone, and accepts an infinite norm."""
    norm = original(list(tensors), norm_type, False, *options)
    if error_if_nonfinite and (norm.isnan() or (benign and norm.isinf())):
        raise RuntimeError(f"the norm {norm} is non-finite")
    return norm


@defect(
    "CLIP-7",
    "id = dp2-fp32-default-meta",
    "https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_value_.html",
)
@instead_of("torch", "_foreach_clamp_min_")
def torch_clip_values_from_above(benign: bool, _original: object, tensors: Iterable[Tensor], minimum: float) -> None:
    """clip_grad_value_ does not apply the lower limit to sharded gradients."""
    for tensor in tensors if benign else ():
        tensor.clamp_(min=minimum)


@defect(
    "CLIP-4",
    "id = dp2-fp32-default-meta",
    "https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html",
)
@instead_of(_CLIP_GRAD, "_clip_grads_with_norm_")
def torch_clip_leaves_one_alone(benign: bool, original: Call, parameters: list[Tensor], *arguments: Any) -> None:
    """A check for an empty list takes one gradient for none: a parameter by itself is not clipped."""
    if len(parameters) > 1:
        original(parameters, *arguments)
    elif benign:
        original(parameters[0], *arguments)
