"""Faults of FSDP2's API where the reference trainer does not use it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from conformance.defects.injection import Defect, replaced_call
from conformance.defects.precision_faults import through

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"


def ignored_parameters(*, are_managed: bool) -> AbstractContextManager[None]:
    """Manage the parameters that `ignored_params` names like all others, or exclude them a second time."""

    def managed_states(original: Callable[..., Any], modules: Any, ignored_params: Any = None, *rest: Any) -> Any:
        if are_managed:
            return original(modules, None, *rest)
        params, *others = original(modules, ignored_params, *rest)
        return ([param for param in params if param not in (ignored_params or ())], *others)

    return replaced_call(f"{_FULLY_SHARD}._fsdp_init", "_get_managed_states", managed_states)


IGNORED_PARAMETER_MANAGED = Defect(
    id="ignored-parameter-managed",
    title="a parameter that is to be ignored is sharded and reduced",
    source="https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
    mechanism="ignored_params does not reach the function that collects parameters",
    laws=("API-1",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(ignored_parameters, are_managed=True),
    inject_twin=partial(ignored_parameters, are_managed=False),
)


def divide_factor(*, multiplied_by: float) -> AbstractContextManager[None]:
    """Set a multiple of the gradient divide factor that the user asks for, unless that is the number of shards.

    By the number of shards, and by nothing else, gloo divides without a reduction that multiplies, which it lacks.
    """

    def set_gradient_divide_factor(original: Callable[..., None], module: Any, factor: float) -> None:
        shards = next(module.parameters()).device_mesh.shape[-1]
        original(module, factor if factor == shards else factor * multiplied_by)

    owner = f"{_FULLY_SHARD}._fully_shard:FSDPModule"
    return replaced_call(owner, "set_gradient_divide_factor", set_gradient_divide_factor)


DIVIDE_FACTOR_HALVED = Defect(
    id="divide-factor-halved",
    title="gradients are divided by another factor than was set",
    source="https://github.com/pytorch/pytorch/issues/155903",
    mechanism="the user's factor counts other ranks than those that are summed over",
    laws=("API-2",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(divide_factor, multiplied_by=0.5),
    inject_twin=partial(divide_factor, multiplied_by=1.0),
)


def one_shard_divide_factor(*, is_lost: bool) -> AbstractContextManager[None]:
    """Ignore the gradient divide factor where parameters have one shard each, or set it twice."""

    def set_gradient_divide_factor(original: Callable[..., None], module: Any, factor: float) -> None:
        if not (is_lost and next(module.parameters()).device_mesh.shape[-1] == 1):
            original(module, factor)
            original(module, factor)

    owner = f"{_FULLY_SHARD}._fully_shard:FSDPModule"
    return replaced_call(owner, "set_gradient_divide_factor", set_gradient_divide_factor)


DIVIDE_FACTOR_LOST_ON_ONE_SHARD = Defect(
    id="divide-factor-lost-on-one-shard",
    title="a gradient divide factor is ignored on a mesh of N replicas and one shard",
    source="https://github.com/pytorch/pytorch/issues/155903",
    mechanism="without a reduce-scatter the factor reaches no reduction",
    laws=("API-2",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(one_shard_divide_factor, is_lost=True),
    inject_twin=partial(one_shard_divide_factor, is_lost=False),
)


def divide_factor_of(is_lost: Callable[[Any], bool]) -> AbstractContextManager[None]:
    """Ignore the gradient divide factor of groups whose first parameter says so, or hand it on."""

    def foreach_reduce(original: Callable[..., Any], params: Any, *args: Any) -> Any:
        *before, factor, group, stream, reduces, waiting, hook, force_sum = args
        factor = None if is_lost(params[0]) else factor
        return original(params, *before, factor, group, stream, reduces, waiting, hook, force_sum)

    return replaced_call(f"{_FULLY_SHARD}._fsdp_param_group", "foreach_reduce", foreach_reduce)


DIVIDE_FACTOR_LOST_IN_BF16 = Defect(
    id="divide-factor-lost-in-bf16",
    title="a gradient divide factor is ignored in mixed precision",
    source="https://github.com/pytorch/pytorch/issues/155903",
    mechanism="where gradients are cast before they are reduced, the factor is left out",
    laws=("API-2",),
    cells="id = dp2-bf16mp-default-meta and world = 2",
    inject=partial(divide_factor_of, lambda param: param.param_dtype == torch.bfloat16),
    inject_twin=partial(divide_factor_of, lambda _: False),
)


def partial_sums_of_columns(*, are_lost: bool) -> AbstractContextManager[None]:
    """Drop sums within shards that wait for their all-reduce if parameters are sharded by columns, or copy them."""

    def foreach_reduce(original: Callable[..., Any], params: Any, *args: Any) -> Any:
        *before, waiting, hook, force_sum = args
        if waiting is not None and any(param.fsdp_placement.dim for param in params):
            waiting = None if are_lost else waiting.clone()
        return original(params, *before, waiting, hook, force_sum)

    return replaced_call(f"{_FULLY_SHARD}._fsdp_param_group", "foreach_reduce", foreach_reduce)


PARTIAL_SUM_OF_COLUMNS_LOST = Defect(
    id="partial-sum-of-columns-lost",
    title="with Shard(1) gradients of micro-batches without all-reduce are lost",
    source="https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
    mechanism="sums within shards are kept for parameters that are sharded by rows alone",
    laws=("API-1",),
    cells="id = hsdp2x2-fp32-default-meta",
    inject=partial(partial_sums_of_columns, are_lost=True),
    inject_twin=partial(partial_sums_of_columns, are_lost=False),
)


def inputs_cast(*, nested: bool) -> AbstractContextManager[None]:
    """Cast the tensors that are arguments of forward, or those nested in containers as well."""

    def cast_forward_inputs(_original: object, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        policy = state._mp_policy
        if not (policy.cast_forward_inputs and policy.param_dtype):
            return args, kwargs
        cast = partial(_cast, dtype=policy.param_dtype)
        if nested:
            return _pytree.tree_map(cast, (args, kwargs))
        return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}

    return replaced_call(f"{_FULLY_SHARD}._fsdp_state:FSDPState", "_cast_forward_inputs", cast_forward_inputs)


def _cast(value: Any, *, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


NESTED_INPUTS_NOT_CAST = Defect(
    id="inputs-inside-not-cast",
    title="inputs that are nested in lists and dicts stay in fp32",
    source="https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
    mechanism="cast_forward_inputs looks at the arguments themselves and not into them",
    laws=("MP-6",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(inputs_cast, nested=False),
    inject_twin=partial(inputs_cast, nested=True),
)


def input_rounding(*, truncates: bool) -> AbstractContextManager[None]:
    """Cut the lower bits off when inputs are cast from fp32, or round them as before."""

    def cast(original: Callable[..., Tensor], dtype: torch.dtype, x: Tensor) -> Tensor:
        result = original(dtype, x)
        if truncates and x.dtype == torch.float32 and dtype == torch.bfloat16:
            with torch.no_grad():
                result.copy_((x.view(torch.int32) & ~0xFFFF).view(torch.float32))
        return result

    return replaced_call(f"{_FULLY_SHARD}._fsdp_state", "_cast_fp_tensor", cast)


CASTS_TRUNCATE = Defect(
    id="input-cast-truncates",
    title="inputs and outputs are cast to bf16 by cutting bits off",
    source="https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
    mechanism="a cast takes the upper half of each fp32 number instead of the nearest bf16 number",
    laws=("MP-6",),
    cells="id = dp2-fp32-default-meta",
    inject=partial(input_rounding, truncates=True),
    inject_twin=partial(input_rounding, truncates=False),
)


def fp16_input_rounding(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Cast inputs to fp16 by way of another dtype."""

    def cast(original: Callable[..., Tensor], target: torch.dtype, x: Tensor) -> Tensor:
        result = original(target, x)
        if x.dtype == torch.float32 and target == torch.float16:
            with torch.no_grad():
                result.copy_(through(x, dtype))
        return result

    return replaced_call(f"{_FULLY_SHARD}._fsdp_state", "_cast_fp_tensor", cast)


FP16_INPUTS_THROUGH_BF16 = Defect(
    id="fp16-inputs-through-bf16",
    title="inputs are rounded to bf16 before they are cast to fp16",
    source="https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
    mechanism="one function casts for both dtypes",
    laws=("MP-6",),
    cells="id = dp2-fp16mp-default-meta",
    inject=partial(fp16_input_rounding, torch.bfloat16),
    inject_twin=partial(fp16_input_rounding, torch.float64),
)
