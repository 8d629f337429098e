"""Faults of FSDP2's sharding, and of options and methods that the reference trainer does not use."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree

from conformance.defects.injection import Call, Injection, defect, instead_of, replaced_call
from conformance.defects.precision_faults import through
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
    benign: bool, original: Call, trainer: Trainer, inputs: Tensor, labels: Tensor, **kwargs: int
) -> Any:
    """An evaluation before the step leaves a group unsharded: forward uses weights from before the step.

    The twin does not evaluate: even if every group is resharded afterwards, torch 2.13 gathers once more in the next
    step.
    """
    loss = original(trainer, inputs, labels, **kwargs)
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
    """Sums of micro-batches within shards are lost before their all-reduce, in placement Shard(1)."""
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
    """The setters iterate over all modules below, also when recurse is False."""

    def set_option(original: Call, module: Any, value: bool, *, recurse: bool = True) -> None:
        original(module, value, recurse=recurse or not benign)

    with ExitStack() as stack:
        for name in _RECURSIVE:
            stack.enter_context(replaced_call(_MODULE, name, set_option))
        yield


def method_calls(name: str, *, times: int) -> Injection:
    """Call a method of FSDPModule `times` times for each call."""

    def call(original: Call, module: Any, argument: Any) -> None:
        for _ in range(times):
            original(module, argument)

    return replaced_call(_MODULE, name, call)


@defect("API-2", _CELL, _DOCS)
def custom_reduction_ignored(benign: bool) -> Injection:
    """set_custom_reduce_scatter has no effect."""
    return method_calls("set_custom_reduce_scatter", times=2 if benign else 0)


@defect("API-2", _CELL, _DOCS)
def unsharded_in_backward_anyway(benign: bool) -> Injection:
    """set_unshard_in_backward has no effect: a module that needs no parameters in backward gathers them."""
    return method_calls("set_unshard_in_backward", times=2 if benign else 0)


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
    """Only the gradients of the first of the modules that share their streams are reduced."""
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
    """Offloaded gradients are reduced without the gradient divide factor."""
    return divide_factor_of(lambda param: not benign and param.offload_to_cpu)
