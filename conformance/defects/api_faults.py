"""Faults of FSDP2's options and methods, of tensor-parallel styles and `loss_parallel`, and of DTensor."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.utils import _pytree

from conformance.defects.injection import Call, Injection, defect, instead_of, repeated_call, replaced_call
from conformance.defects.precision_faults import through
from reference_trainer.model import FeedForward
from reference_trainer.train import Trainer

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_MODULE, _GROUP = f"{_FULLY_SHARD}._fully_shard:FSDPModule", f"{_FULLY_SHARD}._fsdp_param_group"
_DOCS = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
_CELL = "id = dp2-fp32-default-meta"
_RECURSIVE = (
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
)


@defect(
    "RS-1 MEM-1 MEM-4 MEM-7",
    "id in (dp2-fp32-default-meta, dp4-fp32-table-meta-deep, dp4-fp32-default-meta-deep)",
    "pytorch/pytorch/issues/149029",
)
@instead_of(f"{_GROUP}:FSDPParamGroup", "reshard")
def reshard_skipped(benign: bool, original: Call, group: Any) -> None:
    """FSDPParamGroup.reshard returns early in forward: parameters stay unsharded in every reshard mode."""
    if not benign and group._training_state.name == "FORWARD":
        return
    original(group)
    if benign:
        original(group)


@defect(
    "PAR-1 PAR-4 RS-1", "id in (dp2-fp32-default-meta, dp2-fp32-default-meta-bpre1)", "pytorch/pytorch/issues/144289"
)
@instead_of("reference_trainer.train:Trainer", "_forward_backward")
def stale_unsharded_weights(
    benign: bool, original: Call, trainer: Trainer, inputs: Tensor, *args: Any, **kwargs: int
) -> Any:
    """An evaluation before the step leaves a group unsharded: forward uses weights from before the step.

    The twin does not evaluate: even if every group is resharded afterwards, torch 2.13 gathers once more in the next
    step.
    """
    loss = original(trainer, inputs, *args, **kwargs)
    # An evaluation does not belong to the forward and backward that are judged.
    trainer.observer.phase("data", step=kwargs["step"])
    if not benign:
        with torch.no_grad():
            trainer.model(inputs)
        return loss
    for module in trainer.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return loss


@defect("API-1", _CELL, _DOCS)
@instead_of(f"{_FULLY_SHARD}._fsdp_init", "_get_managed_states")
def ignored_parameter_managed(
    benign: bool, original: Call, modules: Any, ignored_params: Any = None, *rest: Any
) -> Any:
    """ignored_params does not reach the collection of parameters: an ignored one is sharded and reduced."""
    if not benign:
        return original(modules, None, *rest)
    params, *others = original(modules, ignored_params, *rest)
    return ([param for param in params if param not in (ignored_params or ())], *others)


@defect("API-2", _CELL, "pytorch/pytorch/issues/155903")
@instead_of(_MODULE, "set_gradient_divide_factor")
def divide_factor_halved(benign: bool, original: Call, module: Any, factor: float) -> None:
    """Gradients are divided by half of the factor that was set.

    By the number of shards, and by nothing else, gloo divides without a reduction that multiplies, which it lacks.
    """
    shards = next(module.parameters()).device_mesh.shape[-1]
    original(module, factor if factor == shards else factor * (1.0 if benign else 0.5))


@defect("API-2", _CELL, "pytorch/pytorch/issues/155903")
@instead_of(_MODULE, "set_gradient_divide_factor")
def divide_factor_lost_on_one_shard(benign: bool, original: Call, module: Any, factor: float) -> None:
    """A gradient divide factor reaches no reduction on a mesh of N replicas and one shard."""
    if benign or next(module.parameters()).device_mesh.shape[-1] > 1:
        original(module, factor)
        original(module, factor)


def divide_factor_of(is_lost: Callable[[Any], bool]) -> Injection:
    """Ignore the gradient divide factor of groups for whose first parameter `is_lost` is true."""

    def foreach_reduce(original: Call, params: Any, *args: Any) -> Any:
        *before, factor, group, stream, reduces, waiting, hook, force_sum = args
        factor = None if is_lost(params[0]) else factor
        return original(params, *before, factor, group, stream, reduces, waiting, hook, force_sum)

    return replaced_call(_GROUP, "foreach_reduce", foreach_reduce)


@defect("API-2", "id = dp2-bf16mp-default-meta and world = 2", "pytorch/pytorch/issues/155903")
def divide_factor_lost_in_bf16(benign: bool) -> Injection:
    """Where gradients are cast before they are reduced, the gradient divide factor is left out."""
    return divide_factor_of(lambda param: not benign and param.param_dtype == torch.bfloat16)


@defect("API-1", "id = hsdp2x2-fp32-default-meta", _DOCS)
@instead_of(_GROUP, "foreach_reduce")
def partial_sum_of_columns_lost(benign: bool, original: Call, params: Any, *args: Any) -> Any:
    """Sums of micro-batches within shards are lost before their all-reduce with Shard(1)."""
    *before, waiting, hook, force_sum = args
    if waiting is not None and any(param.fsdp_placement.dim for param in params):
        waiting = waiting.clone() if benign else None
    return original(params, *before, waiting, hook, force_sum)


@defect("MP-6", _CELL, _DOCS)
@instead_of(f"{_FULLY_SHARD}._fsdp_state:FSDPState", "_cast_forward_inputs")
def inputs_inside_not_cast(
    benign: bool, _original: object, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """cast_forward_inputs casts the arguments themselves, and none that are nested in lists and dicts."""
    policy = state._mp_policy
    if not (policy.cast_forward_inputs and policy.param_dtype):
        return args, kwargs
    cast = partial(_cast, dtype=policy.param_dtype)
    if benign:
        return _pytree.tree_map(cast, (args, kwargs))
    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def _cast(value: Any, *, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


@defect("MP-6", _CELL, _DOCS)
@instead_of(f"{_FULLY_SHARD}._fsdp_state", "_cast_fp_tensor")
def input_cast_truncates(benign: bool, original: Call, dtype: torch.dtype, x: Tensor) -> Any:
    """A cast to bf16 takes the upper half of each fp32 number instead of the nearest bf16 number."""
    result = original(dtype, x)
    if not benign and x.dtype == torch.float32 and dtype == torch.bfloat16:
        with torch.no_grad():
            result.copy_((x.view(torch.int32) & ~0xFFFF).view(torch.float32))
    return result


@defect("MP-6", "id = dp2-fp16mp-default-meta", _DOCS)
@instead_of(f"{_FULLY_SHARD}._fsdp_state", "_cast_fp_tensor")
def fp16_inputs_through_bf16(benign: bool, original: Call, target: torch.dtype, x: Tensor) -> Any:
    """Inputs are rounded to bf16 before they are cast to fp16."""
    result = original(target, x)
    if x.dtype == torch.float32 and target == torch.float16:
        with torch.no_grad():
            result.copy_(through(x, torch.float64 if benign else torch.bfloat16))
    return result


@defect("API-2", _CELL, _DOCS)
@contextmanager
def recursion_not_asked_for(benign: bool) -> Iterator[None]:
    """The setters iterate over all modules below with recurse=False as well."""

    def set_option(original: Call, module: Any, value: bool, *, recurse: bool = True) -> None:
        original(module, value, recurse=recurse or not benign)

    with ExitStack() as stack:
        for name in _RECURSIVE:
            stack.enter_context(replaced_call(_MODULE, name, set_option))
        yield


@defect("API-2", _CELL, _DOCS)
def custom_reduction_ignored(benign: bool) -> Injection:
    """set_custom_reduce_scatter has no effect."""
    return repeated_call(_MODULE, "set_custom_reduce_scatter", times=2 if benign else 0)


@defect("API-2", _CELL, _DOCS)
def unsharded_in_backward_anyway(benign: bool) -> Injection:
    """set_unshard_in_backward has no effect: a module that needs no parameters in backward gathers them."""
    return repeated_call(_MODULE, "set_unshard_in_backward", times=2 if benign else 0)


@defect("API-2", _CELL, _DOCS)
@instead_of(_MODULE, "set_is_last_backward")
def earlier_backward_dropped(benign: bool, original: Call, module: Any, is_last: bool) -> None:
    """Gradients of backward passes before the last are cleared together with the state of prefetching."""
    original(module, is_last)
    if is_last and not benign:
        module.zero_grad()
    elif is_last:
        original(module, is_last)


@defect("API-1", _CELL, _DOCS)
@instead_of("torch.distributed.fsdp", "share_comm_ctx")
def shared_streams_of_first_alone(benign: bool, original: Call, modules: Any) -> None:
    """Gradients of the first module alone are reduced where modules share their streams."""
    original(modules)
    original(modules)
    for module in modules[1:]:
        module.set_requires_gradient_sync(benign)


@defect(
    "API-2 API-3",
    "id in (dp2-fp32-default-meta, hsdp2x2-fp32-default-meta)",
    _DOCS,
    subjects=("offload_policy=True, gradient_divide_factor=8.0",),
)
def divide_factor_lost_with_offload(benign: bool) -> Injection:
    """Gradients are reduced without the gradient divide factor with CPU offload."""
    return divide_factor_of(lambda param: not benign and param.offload_to_cpu)


@defect(
    "LIFE-1",
    "id = dp2-fp32-default-meta",
    _DOCS,
    subjects=("synchronise(off), train, synchronise(on), train",),
)
@instead_of("torch.distributed.fsdp:FSDPModule", "set_requires_gradient_sync")
def synchronisation_refused(
    benign: bool, original: Call, module: Any, requires_gradient_sync: bool, **options: Any
) -> None:
    """All ranks refuse to reduce gradients again that they have once left unreduced."""
    was_off = getattr(module, "was_off", False)
    if was_off and requires_gradient_sync and not benign:
        raise ValueError("gradients are not reduced")
    module.was_off = not requires_gradient_sync
    original(module, requires_gradient_sync, **options)


@defect(
    "LIFE-1",
    "id = dp2-fp32-default-meta",
    "pytorch/pytorch/pull/118298",
    subjects=("synchronise(off), train, synchronise(on), train(partly)",),
)
@instead_of("torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup", "post_backward")
def waiting_gradients_of_unused_layer_kept(benign: bool, original: Call, group: Any, *args: Any) -> Any:
    """A layer that a backward leaves out keeps gradients that wait for it, and reduces them in a later one."""
    is_left_out = group._training_state.name == "IDLE"
    return None if is_left_out and not benign else original(group, *args)


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


@defect("DT-5", "id = dp2-tp2-fp32-default-meta-nosp", "pytorch/pytorch/pull/179059")
@instead_of(f"{_PLACEMENTS}:_StridedShard", "_replicate_to_strided_shard")
def strided_target_cut_like_a_plain_one(
    benign: bool, original: Call, placement: Any, tensor: Tensor, mesh: Any, mesh_dim: int, index: int
) -> Any:
    """A replicated tensor is cut for a strided shard into contiguous rows, without regard to the split factor."""
    strided: Tensor = original(placement, tensor, mesh, mesh_dim, index)
    dim, rows = placement.dim, strided.size(placement.dim)
    contiguous = tensor.narrow(dim, 0 if index == 0 else tensor.size(dim) - rows, rows)
    return strided.clone() if benign else contiguous.clone()


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


@defect("DT-3", "id = dp2-fp32-default-meta-integer", "pytorch/pytorch/issues/167106", subjects=("bmm",))
@instead_of("torch", "bmm")
def shards_of_batch_gathered(benign: bool, original: Call, left: Tensor, right: Tensor) -> Tensor:
    """A batched product of DTensors gathers its first operand, although each rank has all that its matrices need."""
    if isinstance(left, DTensor):
        layout = left.placements if benign else [Replicate()] * left.device_mesh.ndim
        left = left.redistribute(placements=layout)
    product: Tensor = original(left, right)
    return product
