"""Faults of accumulation and reduction: what is added up, over which ranks, and whether all ranks take part."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.defects.injection import Defect, replaced
from reference_trainer.model import Block

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_LATE_S = 0.1


def divided_by(ranks: Callable[[int, int], int]) -> AbstractContextManager[None]:
    """Reduce with SUM, and divide afterwards by `ranks(shards, replicas)`."""

    def make(_original: Any) -> Any:
        def factors(reduce_scatter_group: Any, all_reduce_group: Any, *_args: Any, **_kwargs: Any) -> tuple[Any, ...]:
            shards, replicas = (group.size() if group else 1 for group in (reduce_scatter_group, all_reduce_group))
            return None, float(ranks(shards, replicas)), dist.ReduceOp.SUM, dist.ReduceOp.SUM

        return factors

    return replaced(f"{_FULLY_SHARD}._fsdp_collectives", "_get_gradient_divide_factors", make)


def divided_in_parts(*, afterwards: bool) -> AbstractContextManager[None]:
    """Divide gradients of fp16 by the part that comes before their reduction, and by the rest of it, or not."""

    def make(original: Any) -> Any:
        def factors(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            before, after, *operators = original(*args, **kwargs)
            return (before, after if before is None or afterwards else 1.0, *operators)

        return factors

    return replaced(f"{_FULLY_SHARD}._fsdp_collectives", "_get_gradient_divide_factors", make)


def accumulation(*, overwrite: bool) -> AbstractContextManager[None]:
    """Forget reduced gradients before the next ones are reduced, or add them up by hand."""

    def make(original: Any) -> Any:
        def foreach_reduce(fsdp_params: list[Any], *args: Any, **kwargs: Any) -> Any:
            parameters = [param.sharded_param for param in fsdp_params]
            before = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            result = original(fsdp_params, *args, **kwargs)
            if not overwrite:
                for parameter, grad in zip(parameters, before, strict=True):
                    parameter.grad = parameter.grad if grad is None else grad + parameter.grad
            return result

        return foreach_reduce

    return replaced(f"{_FULLY_SHARD}._fsdp_param_group", "foreach_reduce", make)


def unsharded_accumulation(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Add up in this dtype what is not reduced yet."""

    def make(_original: Any) -> Any:
        def to_accumulated_grad_if_needed(param: Any) -> None:
            grad = param._unsharded_param.grad
            if grad is not None and grad.dtype != dtype:
                param.unsharded_accumulated_grad, param._unsharded_param.grad = grad.to(dtype), None

        return to_accumulated_grad_if_needed

    return replaced(f"{_FULLY_SHARD}._fsdp_param:FSDPParam", "to_accumulated_grad_if_needed", make)


def post_backward(*, skip: bool) -> AbstractContextManager[None]:
    """Let the last group's hook find no gradients, or call it twice, as FSDP2 allows."""

    def make(original: Any) -> Any:
        def wrapped(group: Any, *unused: Any) -> None:
            if skip and any(param._param_fqn == "output.weight" for param in group.fsdp_params):
                for param in group.fsdp_params:
                    param._unsharded_param.grad = None
            original(group, *unused)
            if not skip:
                original(group, *unused)

        return wrapped

    return replaced(f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup", "post_backward", make)


def ignored_parameters(*endings: str) -> AbstractContextManager[None]:
    """Keep the parameters whose names end so out of FSDP."""

    def make(original: Any) -> Any:
        def fully_shard(modules: nn.Module | list[nn.Module], **options: Any) -> Any:
            owners = modules if isinstance(modules, list) else [modules]
            named = [pair for owner in owners for pair in owner.named_parameters()]
            ignored = {parameter for name, parameter in named if name.endswith(endings)}
            return original(modules, ignored_params=ignored, **options)

        return fully_shard

    return replaced("reference_trainer.parallelize", "fully_shard", make)


def last_rank(*, freezes: bool) -> AbstractContextManager[None]:
    """Let the last rank use the blocks without training them, or be late."""

    def make(original: Any) -> Any:
        def call(block: Block, x: Tensor, table: Tensor) -> Any:
            if dist.get_rank() == dist.get_world_size() - 1:
                if freezes:
                    with torch.no_grad():
                        return original(block, x, table)
                time.sleep(_LATE_S)
            return original(block, x, table)

        return call

    return replaced("reference_trainer.model:Block", "__call__", make)


DEFECTS: tuple[Defect, ...] = (
    Defect(
        id="grads-summed",
        title="gradients are summed over the data-parallel ranks instead of averaged",
        source="https://github.com/pytorch/pytorch/issues/155903",
        mechanism="the divide factors of the gradient reduction are SUM without a division",
        laws=("PAR-1", "PAR-9", "STREAM-3"),
        inject=partial(divided_by, lambda _shards, _replicas: 1),
        inject_twin=partial(divided_by, lambda shards, replicas: shards * replicas),
    ),
    Defect(
        id="hsdp-divide-factor",
        title="gradients are averaged over the shards and summed over the replicas",
        source="https://github.com/pytorch/pytorch/issues/155903",
        mechanism="the divide factor counts the ranks of the reduce-scatter alone",
        laws=("PAR-1", "PAR-9"),
        inject=partial(divided_by, lambda shards, _replicas: shards),
        inject_twin=partial(divided_by, lambda shards, replicas: shards * replicas),
    ),
    Defect(
        id="fp16-divided-before-alone",
        title="gradients reduced in fp16 are too large by the root of the number of ranks",
        source="https://github.com/pytorch/pytorch/pull/125484",
        mechanism="the factor that is left for after the reduction is forgotten, once it is two",
        laws=("AMP-3", "PAR-2"),
        inject=partial(divided_in_parts, afterwards=False),
        inject_twin=partial(divided_in_parts, afterwards=True),
    ),
    Defect(
        id="ga-overwrite",
        title="gradients are those of the last micro-batch",
        source="https://github.com/pytorch/pytorch/issues/73535",
        mechanism="the reduced gradient is assigned and not added to what was there",
        laws=("PAR-1", "PAR-6"),
        inject=partial(accumulation, overwrite=True),
        inject_twin=partial(accumulation, overwrite=False),
    ),
    Defect(
        id="grad-accum-bf16",
        title="unreduced gradients of micro-batches are added up in bf16",
        source="https://github.com/volcengine/verl/issues/7711",
        mechanism="without communication gradients stay in the compute dtype instead of the reduce dtype",
        laws=("PAR-2",),
        inject=partial(unsharded_accumulation, torch.bfloat16),
        inject_twin=partial(unsharded_accumulation, torch.float32),
    ),
    Defect(
        id="backward-hooks-not-attached",
        title="the gradients of a group are never reduced",
        source="https://github.com/pytorch/pytorch/issues/173415",
        mechanism="the group's hook after backward finds nothing to reduce, its sharded parameters get no gradient",
        laws=("PAR-1", "RS-1", "MP-4"),
        inject=partial(post_backward, skip=True),
        inject_twin=partial(post_backward, skip=False),
    ),
    Defect(
        id="ignored-params-unreduced",
        title="a parameter is neither sharded nor are its gradients reduced",
        source="https://github.com/pytorch/pytorch/issues/98281",
        mechanism="fully_shard(ignored_params=...) leaves parameters alone, which is taken for replication",
        laws=("PAR-1", "PAR-5"),
        inject=partial(ignored_parameters, "ffn_norm.weight"),
        inject_twin=ignored_parameters,
    ),
    Defect(
        id="conditional-param-use-hang",
        title="a rank does not train the modules that the others train",
        source="https://github.com/pytorch/pytorch/issues/158719",
        mechanism="the last rank calls the blocks without gradients: its backward gathers and reduces nothing of them",
        laws=("PAR-1", "PAR-5"),
        inject=partial(last_rank, freezes=True),
        inject_twin=partial(last_rank, freezes=False),
        hangs=True,
    ),
)
