"""Faults of accumulation and reduction: what is added up, over which ranks, and which ranks participate."""

import inspect
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.defects.injection import Defect, replaced_call
from reference_trainer.model import Block

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_DELAY_S = 0.1


def reduced_by_sum(divisor: Callable[[int, int], int]) -> AbstractContextManager[None]:
    """Reduce gradients with SUM, and divide them afterwards by `divisor(shards, replicas)`."""

    def factors(_original: object, shard_group: Any, replicate_group: Any, *_args: Any, **_kwargs: Any) -> Any:
        shards, replicas = (group.size() if group else 1 for group in (shard_group, replicate_group))
        return None, float(divisor(shards, replicas)), dist.ReduceOp.SUM, dist.ReduceOp.SUM

    return replaced_call(f"{_FULLY_SHARD}._fsdp_collectives", "_get_gradient_divide_factors", factors)


GRADIENTS_SUMMED = Defect(
    id="grads-summed",
    title="gradients are summed over the data-parallel ranks instead of averaged",
    source="https://github.com/pytorch/pytorch/issues/155903",
    mechanism="the divide factors of the gradient reduction are SUM without a division",
    laws=("PAR-1", "PAR-2", "PAR-9", "CKPT-1", "CKPT-3", "STREAM-3"),
    cells="id in (dp2-fp32-default-meta-sgd, dp2-fp32-default-meta-integer-sgd-noclip-steps1)"
    " or id in (dp2-fp32-default-full-fsdp1, dp2-bf16mixed-default-meta)"
    " or id in (dp2-fp32-default-meta-from.same, dp2-fp32-default-meta-from.same-async)",
    inject=partial(reduced_by_sum, lambda _shards, _replicas: 1),
    inject_twin=partial(reduced_by_sum, lambda shards, replicas: shards * replicas),
)
HSDP_DIVIDE_FACTOR = Defect(
    id="hsdp-divide-factor",
    title="gradients are averaged over the shards and summed over the replicas",
    source="https://github.com/pytorch/pytorch/issues/155903",
    mechanism="the divide factor counts the ranks of the reduce-scatter alone",
    laws=("PAR-1", "PAR-9"),
    cells="id in (hsdp2x2-fp32-default-meta, hsdp2x2-fp32-default-meta-integer-sgd-noclip-steps1)",
    inject=partial(reduced_by_sum, lambda shards, _replicas: shards),
    inject_twin=partial(reduced_by_sum, lambda shards, replicas: shards * replicas),
)


def postdivide_factor(*, forgotten: bool) -> AbstractContextManager[None]:
    """Divide fp16 gradients after their reduction by 1 instead of the factor that is left, or by that factor."""

    def factors(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        predivide, postdivide, *operators = original(*args, **kwargs)
        return (predivide, 1.0 if forgotten and predivide is not None else postdivide, *operators)

    return replaced_call(f"{_FULLY_SHARD}._fsdp_collectives", "_get_gradient_divide_factors", factors)


FP16_POSTDIVIDE_FACTOR_FORGOTTEN = Defect(
    id="fp16-divided-before-alone",
    title="gradients reduced in fp16 are too large by the root of the number of ranks",
    source="https://github.com/pytorch/pytorch/pull/125484",
    mechanism="the divide factor is split into one before and one after the reduction, and the latter is forgotten",
    laws=("AMP-3", "PAR-2"),
    cells="id = hsdp2x2-fp16reduce-default-meta",
    inject=partial(postdivide_factor, forgotten=True),
    inject_twin=partial(postdivide_factor, forgotten=False),
)


def accumulation(*, overwrite: bool) -> AbstractContextManager[None]:
    """Forget reduced gradients before the next ones are reduced, or accumulate them here instead of in FSDP2."""

    def foreach_reduce(original: Callable[..., Any], fsdp_params: list[Any], *args: Any, **kwargs: Any) -> Any:
        parameters = [param.sharded_param for param in fsdp_params]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        result = original(fsdp_params, *args, **kwargs)
        if not overwrite:
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = parameter.grad if grad is None else grad + parameter.grad
        return result

    return replaced_call(f"{_FULLY_SHARD}._fsdp_param_group", "foreach_reduce", foreach_reduce)


GRADIENT_ACCUMULATION_OVERWRITES = Defect(
    id="ga-overwrite",
    title="gradients are those of the last micro-batch",
    source="https://github.com/pytorch/pytorch/issues/73535",
    mechanism="the reduced gradient is assigned and not added to the gradient that is there",
    laws=("PAR-1", "PAR-6"),
    cells="id = dp2-fp32-default-meta-acc2",
    inject=partial(accumulation, overwrite=True),
    inject_twin=partial(accumulation, overwrite=False),
)


def partial_sums(*, overwrite: bool) -> AbstractContextManager[None]:
    """Forget the partial sums that wait for the all-reduce when another micro-batch is reduced, or copy them."""

    def foreach_reduce(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs)
        held = call.arguments["partial_reduce_output"]
        if held is not None and not call.arguments["all_reduce_grads"]:
            call.arguments["partial_reduce_output"] = None if overwrite else held.clone()
        return original(*call.args, **call.kwargs)

    return replaced_call(f"{_FULLY_SHARD}._fsdp_param_group", "foreach_reduce", foreach_reduce)


HSDP_PARTIAL_SUM_OVERWRITTEN = Defect(
    id="hsdp-partial-sum-overwritten",
    title="gradients that are all-reduced after the last micro-batch lack all but the last two micro-batches",
    source="https://github.com/pytorch/pytorch/pull/194628",
    mechanism="a reduce-scattered gradient replaces the partial sum to which it is to be added",
    laws=("PAR-9",),
    cells="id = hsdp2x2-fp32-default-meta-integer-sgd-noclip-acc4-syncallreducelast-steps1",
    inject=partial(partial_sums, overwrite=True),
    inject_twin=partial(partial_sums, overwrite=False),
)


def unsharded_accumulation(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Accumulate unreduced gradients in this dtype."""

    def to_accumulated_grad_if_needed(_original: object, param: Any) -> None:
        grad = param._unsharded_param.grad
        if grad is not None and grad.dtype != dtype:
            param.unsharded_accumulated_grad, param._unsharded_param.grad = grad.to(dtype), None

    owner = f"{_FULLY_SHARD}._fsdp_param:FSDPParam"
    return replaced_call(owner, "to_accumulated_grad_if_needed", to_accumulated_grad_if_needed)


GRADIENT_ACCUMULATION_BF16 = Defect(
    id="grad-accum-bf16",
    title="unreduced gradients of micro-batches are added up in bf16",
    source="https://github.com/volcengine/verl/issues/7711",
    mechanism="without communication gradients stay in the compute dtype instead of the reduce dtype",
    laws=("PAR-2",),
    cells="id = dp2-bf16mp-default-meta-acc2-synclast",
    inject=partial(unsharded_accumulation, torch.bfloat16),
    inject_twin=partial(unsharded_accumulation, torch.float32),
)


def post_backward_hook(*, skip: bool) -> AbstractContextManager[None]:
    """Let the last group's post-backward hook find no gradients, or call the hook twice, as FSDP2 allows."""

    def post_backward(original: Callable[..., None], group: Any, *unused: Any) -> None:
        if skip and any(param._param_fqn == "output.weight" for param in group.fsdp_params):
            for param in group.fsdp_params:
                param._unsharded_param.grad = None
        original(group, *unused)
        if not skip:
            original(group, *unused)

    return replaced_call(f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup", "post_backward", post_backward)


BACKWARD_HOOKS_NOT_ATTACHED = Defect(
    id="backward-hooks-not-attached",
    title="the gradients of a group are never reduced",
    source="https://github.com/pytorch/pytorch/issues/173415",
    mechanism="the group's hook after backward finds nothing to reduce, its sharded parameters get no gradient",
    laws=("PAR-1", "RS-1", "MP-4"),
    cells="id = dp2-fp32-default-meta-acc2",
    inject=partial(post_backward_hook, skip=True),
    inject_twin=partial(post_backward_hook, skip=False),
)


def ignored_parameters(*endings: str) -> AbstractContextManager[None]:
    """Exclude the parameters whose names have one of these endings from FSDP."""

    def fully_shard(original: Callable[..., Any], modules: nn.Module | list[nn.Module], **options: Any) -> Any:
        owners = modules if isinstance(modules, list) else [modules]
        named = [pair for owner in owners for pair in owner.named_parameters()]
        ignored = {parameter for name, parameter in named if name.endswith(endings)}
        return original(modules, ignored_params=ignored, **options)

    return replaced_call("reference_trainer.parallelize", "fully_shard", fully_shard)


IGNORED_PARAMETERS_UNREDUCED = Defect(
    id="ignored-params-unreduced",
    title="a parameter is neither sharded nor are its gradients reduced",
    source="https://github.com/pytorch/pytorch/issues/98281",
    mechanism="fully_shard(ignored_params=...) leaves parameters alone, which is taken for replication",
    laws=("PAR-1", "PAR-5"),
    cells="id = dp2-fp32-default-meta-sgd",
    inject=partial(ignored_parameters, "ffn_norm.weight"),
    inject_twin=ignored_parameters,
)


def blocks_of_last_rank(*, frozen: bool) -> AbstractContextManager[None]:
    """Let the last rank call its blocks without gradients, or with a delay."""

    def call(original: Callable[..., Any], block: Block, x: Tensor, table: Tensor) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            if frozen:
                with torch.no_grad():
                    return original(block, x, table)
            time.sleep(_DELAY_S)
        return original(block, x, table)

    return replaced_call("reference_trainer.model:Block", "__call__", call)


CONDITIONAL_PARAMETER_USE_HANGS = Defect(
    id="conditional-param-use-hang",
    title="a rank does not train the modules that the others train",
    source="https://github.com/pytorch/pytorch/issues/158719",
    mechanism="the last rank calls the blocks without gradients: its backward gathers and reduces nothing of them",
    laws=("PAR-1", "PAR-5"),
    cells="id = dp2-fp32-default-meta-sgd",
    inject=partial(blocks_of_last_rank, frozen=True),
    inject_twin=partial(blocks_of_last_rank, frozen=False),
    hangs=True,
)
