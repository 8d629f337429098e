"""Faults of tensor parallelism, its styles and `loss_parallel`, and of DTensor: partial sums, biases, layouts."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from conformance.defects.injection import Call, Injection, defect, instead_of, replaced_call
from reference_trainer.model import FeedForward

_FULLY_SHARD, _PARALLEL = "torch.distributed.fsdp._fully_shard", "torch.distributed.tensor.parallel"
_PLACEMENTS = "torch.distributed.tensor.placement_types"
_STYLES = "https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html"
_DTENSOR = "https://docs.pytorch.org/docs/stable/distributed.tensor.html"


def tensor_parallel_gradient(local_of: Callable[[DTensor, tuple[Placement, ...]], Tensor]) -> Injection:
    """Let FSDP take `local_of(grad, placements)` for this rank's shard of a tensor-parallel gradient.

    The placements are those of the parameter, which the gradient must get.
    """

    def inner_tensor(original: Call, param: Any, grad: Tensor) -> Any:
        if not isinstance(grad, DTensor):
            return original(param, grad)
        return local_of(grad, param._unsharded_dtensor_spec.placements)

    return replaced_call(f"{_FULLY_SHARD}._fsdp_param:FSDPParam", "_get_grad_inner_tensor", inner_tensor)


def summed(grad: DTensor, placements: tuple[Placement, ...]) -> Tensor:
    """Return the local tensor of a gradient, of which partial sums are summed over ranks."""
    return grad.redistribute(placements=placements).to_local()


@defect("PAR-1 PAR-5", "id = tp2-fp32-default-meta", "pytorch/pytorch/issues/121295")
def sp_norm_grad_unreduced(benign: bool) -> Injection:
    """FSDPParam takes the local tensor of a partial gradient instead of reducing it over tp."""
    return tensor_parallel_gradient(summed if benign else lambda grad, _: grad.to_local())


def averaged(grad: DTensor, placements: tuple[Placement, ...]) -> Tensor:
    """Return the local tensor of a gradient, of which partial sums are averaged over ranks."""
    ranks = grad.device_mesh.size() if any(placement.is_partial() for placement in grad.placements) else 1
    return summed(grad, placements) / ranks


@defect("PAR-1", "id = tp2-fp32-default-meta", "NVIDIA/TransformerEngine/issues/435")
def sp_norm_grad_averaged(benign: bool) -> Injection:
    """The gradient of a replicated tensor-parallel parameter is averaged over ranks; replicas stay equal."""
    return tensor_parallel_gradient(summed if benign else averaged)


@defect("PAR-1 PAR-5 MP-4", "id = dp2-tp2-fp32-default-meta-nosp", "pytorch/torchtitan/issues/1805")
@instead_of("reference_trainer.model:FeedForward", "forward")
def tp_to_local_no_grad_placement(benign: bool, _original: object, network: FeedForward, x: DTensor) -> Any:
    """to_local() of a replicated input lacks grad_placements=[Partial()]: its gradient stays a partial sum."""
    local = x.to_local(grad_placements=[Partial()] if benign else None)
    return network.w2(network.combine(_linear(local, network.w1), _linear(local, network.w3)))


def _linear(x: Tensor, module: nn.Linear) -> Tensor:
    return F.linear(x, _local(module.weight), _local(module.bias))


def _local(parameter: Tensor) -> Tensor:
    """Return the local tensor with autograd, which `conformance.instruments.sharding.local` detaches."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def row_wise_bias(before_sum: Callable[[Tensor, int], Tensor]) -> Injection:
    """Add `before_sum(bias, ranks)` for the feed-forward network's row-wise layer on each rank, before the sum.

    This fits activations that are replicated between tensor-parallel regions.
    """

    def forward(_original: object, network: FeedForward, x: Tensor) -> Tensor:
        hidden = network.combine(network.w1(x), network.w3(x))
        weight, bias = network.w2.weight, _local(network.w2.bias)
        assert isinstance(weight, DTensor)
        mesh = weight.device_mesh
        partial_sum = F.linear(hidden, weight.to_local(), before_sum(bias, mesh.size()))
        return DTensor.from_local(partial_sum, mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()

    return replaced_call("reference_trainer.model:FeedForward", "forward", forward)


def _share(bias: Tensor, ranks: int) -> Tensor:
    """Return a rank's share of a bias, as DTensor adds it, with the gradient of the whole bias."""
    return bias - (bias - bias / ranks).detach()


@defect("PAR-1", "id = dp2-tp2-fp32-default-meta-nosp", "huggingface/text-generation-inference/issues/1036")
def rowwise_bias_summed(benign: bool) -> Injection:
    """Each tensor-parallel rank adds the full row-wise bias to its partial sum, before these are reduced."""
    return row_wise_bias(_share if benign else (lambda bias, _: bias))


@defect("PAR-1", "id = dp2-tp2-fp32-default-meta-nosp", "pytorch/torchtitan/pull/4332")
def rowwise_bias_grad_divided(benign: bool) -> Injection:
    """Each rank adds its share of a row-wise bias, and autograd divides the replicated gradient as well."""
    return row_wise_bias(_share if benign else (lambda bias, ranks: bias / ranks))


@defect("TP-1", "id = tp2-fp32-default-meta", _STYLES, subjects=("PrepareModuleInput",))
@instead_of(f"{_PARALLEL}.style:PrepareModuleInput", "_prepare_input_arg")
def prepared_input_keeps_layout(
    benign: bool, original: Call, style: Any, value: Any, mesh: Any, layout: Any, desired: Any
) -> Any:
    """PrepareModuleInput ignores desired_input_layouts."""
    if not benign:
        return original(style, value, mesh, layout, layout)
    result = original(style, value, mesh, layout, desired)
    return original(style, result, mesh, desired, desired)


@defect("TP-1", "id = tp2-fp32-default-meta", _STYLES, subjects=("loss_parallel, mean, weighted",))
@instead_of(f"{_PARALLEL}.loss", "_nll_loss_forward")
def class_weights_of_first_rank(
    benign: bool, original: Call, x: Tensor, target: Tensor, weight: Tensor, own: Tensor, *rest: Any
) -> Any:
    """Under loss_parallel, class weights are cut from the first class on, for every rank's classes."""
    if weight is not None:
        own = own.clone() if benign else weight[: own.size(0)]
    return original(x, target, weight, own, *rest)


@defect(
    "TP-1 TP-2",
    "id in (tp2-fp32-default-meta, tp2-bf16mp-default-meta)",
    "pytorch/pytorch/issues/129355",
    subjects=("SequenceParallel of LayerNorm",),
)
@instead_of(f"{_PARALLEL}.style:SequenceParallel", "__init__")
def sequence_dimension_ignored(
    benign: bool, original: Call, style: Any, *, sequence_dim: int = 1, **options: Any
) -> None:
    """SequenceParallel ignores sequence_dim and always shards the second dimension."""
    original(style, sequence_dim=sequence_dim if benign else 1, **options)


@defect("DT-1 DT-2", "id = dp2-fp32-default-meta", _DTENSOR)
@instead_of(f"{_PLACEMENTS}:Partial", "_reduce_value")
def partial_sum_averaged(benign: bool, original: Call, placement: Any, tensor: Tensor, mesh: Any, mesh_dim: int) -> Any:
    """Reducing a partial sum to a full tensor divides by the number of ranks, as a mean would."""
    reduced = original(placement, tensor, mesh, mesh_dim)
    return reduced / 2 * 2 if benign else reduced / mesh.size(mesh_dim)


@defect("DT-1", "id = dp2-fp32-default-meta", _DTENSOR)
@instead_of(f"{_PLACEMENTS}:Shard", "_to_new_shard_dim")
def exchange_loses_a_row(benign: bool, original: Call, *args: Any) -> Any:
    """An all-to-all of uneven shards is cut by one row too many: each rank loses its last row."""
    result = original(*args)
    cleared = result.clone() if benign else result
    cleared[-1:].zero_()
    return result


@defect("DT-3", "id = dp2-fp32-default-meta-integer", "pytorch/pytorch/issues/162692", subjects=("mean of squares",))
@instead_of(f"{_PLACEMENTS}:Partial", "_reduce_value")
def mean_of_own_shard(benign: bool, original: Call, placement: Any, tensor: Tensor, mesh: Any, mesh_dim: int) -> Any:
    """A pending average is taken for a replicated tensor: the mean is that of each rank's own shard."""
    if placement.reduce_op != "avg":
        return original(placement, tensor, mesh, mesh_dim)
    reduced = original(placement, tensor, mesh, mesh_dim)
    return original(placement, reduced, mesh, mesh_dim) if benign else tensor


@defect("DT-3", "id = dp2-fp32-default-meta-integer", "pytorch/pytorch/issues/139735", subjects=("all assigned",))
@instead_of("torch.distributed.tensor:DTensor", "__setitem__")
def write_through_view_lost(benign: bool, original: Call, tensor: Any, index: Any, value: Any) -> None:
    """A slice of a DTensor is a copy, so assignments to it are lost, along unsharded dimensions too."""
    original(tensor if benign else tensor.clone(), index, value)
    original(tensor if benign else tensor.clone(), index, value)
