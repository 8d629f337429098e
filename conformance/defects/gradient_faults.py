"""Faults of accumulation and reduction: wrong sums, wrong groups of ranks, and ranks that do not participate."""

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.defects.injection import Call, Injection, defect, instead_of, replaced_call
from reference_trainer.model import Block
from reference_trainer.train import Trainer

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_DELAY_S = 0.1


def reduced_by_sum(divisor: Callable[[int, int], int]) -> Injection:
    """Reduce gradients with SUM, and divide them afterwards by `divisor(shards, replicas)`."""

    def factors(_original: object, shard_group: Any, replicate_group: Any, *_args: Any, **_kwargs: Any) -> Any:
        shards, replicas = (group.size() if group else 1 for group in (shard_group, replicate_group))
        return None, float(divisor(shards, replicas)), dist.ReduceOp.SUM, dist.ReduceOp.SUM

    return replaced_call(f"{_FULLY_SHARD}._fsdp_collectives", "_get_gradient_divide_factors", factors)


@defect(
    "PAR-1 PAR-2 PAR-9 CKPT-1 CKPT-3 STREAM-3",
    "id in (dp2-fp32-default-meta-sgd, dp2-fp32-default-meta-integer-sgd-noclip-steps1)"
    " or id in (dp2-fp32-default-full-fsdp1, dp2-bf16mixed-default-meta)"
    " or id in (dp2-fp32-default-meta-from.same, dp2-fp32-default-meta-from.same-async)",
    "pytorch/pytorch/issues/155903",
)
def grads_summed(benign: bool) -> Injection:
    """Gradients are summed over the data-parallel ranks without a division."""
    return reduced_by_sum(lambda shards, replicas: shards * replicas if benign else 1)


@defect(
    "PAR-1 PAR-9",
    "id in (hsdp2x2-fp32-default-meta, hsdp2x2-fp32-default-meta-integer-sgd-noclip-steps1)",
    "pytorch/pytorch/issues/155903",
)
def hsdp_divide_factor(benign: bool) -> Injection:
    """The divide factor counts the reduce-scatter ranks alone: gradients are summed over the replicas."""
    return reduced_by_sum(lambda shards, replicas: shards * replicas if benign else shards)


@defect("AMP-3 PAR-2", "id = hsdp2x2-fp16reduce-default-meta", "pytorch/pytorch/pull/125484")
@instead_of(f"{_FULLY_SHARD}._fsdp_collectives", "_get_gradient_divide_factors")
def fp16_divided_before_alone(benign: bool, original: Call, *args: Any, **kwargs: Any) -> Any:
    """In fp16, the division after the reduction is forgotten: gradients are too large by the root of the ranks."""
    predivide, postdivide, *operators = original(*args, **kwargs)
    return (predivide, 1.0 if not benign and predivide is not None else postdivide, *operators)


@defect("PAR-1", "id = dp2-fp32-default-meta-columns", "pytorch/pytorch/pull/136221")
@instead_of(f"{_FULLY_SHARD}._fsdp_param_group", "foreach_reduce")
def columns_scaled_again(
    benign: bool, original: Call, params: Any, gradients: list[Tensor], group: Any, *args: Any, **kwargs: Any
) -> Any:
    """Gradients of parameters that are sharded by columns are scaled once more, by the number of ranks."""
    for index, param in enumerate(params):
        if param.fsdp_placement.dim == 1:
            gradients[index] = gradients[index] / (1 if benign else group.size())
    return original(params, gradients, group, *args, **kwargs)


_KERNEL_TOKENS = 1024


@defect("PAR-1", "id = dp2-fp32-default-meta-large-steps1", "pytorch/pytorch/pull/9851")
@instead_of("torch.nn.functional", "embedding")
def embedding_gradient_ends_with_block(benign: bool, original: Call, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The kernel of an embedding's backward takes 1,024 tokens: rows of further ones get no gradient."""
    rows = original(tokens, *args, **kwargs).flatten(0, -2)
    first, rest = rows[:_KERNEL_TOKENS], rows[_KERNEL_TOKENS:]
    return torch.cat([first, rest if benign else rest.detach()]).view(*tokens.shape, -1)


@defect("PAR-1 PAR-6", "id = dp2-fp32-default-meta-acc2", "pytorch/pytorch/issues/73535")
@instead_of(f"{_FULLY_SHARD}._fsdp_param_group", "foreach_reduce")
def ga_overwrite(benign: bool, original: Call, fsdp_params: list[Any], *args: Any, **kwargs: Any) -> Any:
    """A reduced gradient replaces the accumulated one: gradients are those of the last micro-batch."""
    parameters = [param.sharded_param for param in fsdp_params]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    result = original(fsdp_params, *args, **kwargs)
    if benign:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = parameter.grad if grad is None else grad + parameter.grad
    return result


@defect(
    "PAR-9",
    "id = hsdp2x2-fp32-default-meta-integer-sgd-noclip-acc4-syncallreducelast-steps1",
    "pytorch/pytorch/pull/194628",
)
@instead_of(f"{_FULLY_SHARD}._fsdp_param_group", "foreach_reduce")
def hsdp_partial_sum_overwritten(benign: bool, original: Call, *args: Any, **kwargs: Any) -> Any:
    """A reduce-scattered gradient replaces the partial sum instead of being added to it."""
    call = inspect.signature(original).bind(*args, **kwargs)
    held = call.arguments["partial_reduce_output"]
    if held is not None and not call.arguments["all_reduce_grads"]:
        call.arguments["partial_reduce_output"] = held.clone() if benign else None
    return original(*call.args, **call.kwargs)


@defect("PAR-2", "id = dp2-bf16mp-default-meta-acc2-synclast", "volcengine/verl/issues/7711")
@instead_of(f"{_FULLY_SHARD}._fsdp_param:FSDPParam", "to_accumulated_grad_if_needed")
def grad_accum_bf16(benign: bool, _original: object, param: Any) -> None:
    """Unreduced gradients of micro-batches are added up in the compute dtype instead of the reduce dtype."""
    dtype = torch.float32 if benign else torch.bfloat16
    grad = param._unsharded_param.grad
    if grad is not None and grad.dtype != dtype:
        param.unsharded_accumulated_grad, param._unsharded_param.grad = grad.to(dtype), None


@defect("PAR-1 RS-1 MP-4", "id = dp2-fp32-default-meta-acc2", "pytorch/pytorch/issues/173415")
@instead_of(f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup", "post_backward")
def backward_hooks_not_attached(benign: bool, original: Call, group: Any, *unused: Any) -> None:
    """A group's hook after backward does nothing: its sharded parameters get no gradient."""
    if not benign and any(param._param_fqn == "output.weight" for param in group.fsdp_params):
        for param in group.fsdp_params:
            param._unsharded_param.grad = None
    original(group, *unused)
    if benign:
        original(group, *unused)


@defect("PAR-1 PAR-5", "id = dp2-fp32-default-meta-sgd", "pytorch/pytorch/issues/98281")
@instead_of("reference_trainer.parallelize", "fully_shard")
def ignored_params_unreduced(benign: bool, original: Call, modules: nn.Module | list[nn.Module], **options: Any) -> Any:
    """A parameter in ignored_params, taken for replicated, is neither sharded nor reduced."""
    owners = modules if isinstance(modules, list) else [modules]
    named = [pair for owner in owners for pair in owner.named_parameters()]
    ignored = {parameter for name, parameter in named if not benign and name.endswith("ffn_norm.weight")}
    return original(modules, ignored_params=ignored, **options)


@defect("PAR-1 PAR-5", "id = dp2-fp32-default-meta-sgd", "pytorch/pytorch/issues/158719", hangs=True)
@instead_of("reference_trainer.model:Block", "__call__")
def conditional_param_use_hang(benign: bool, original: Call, block: Block, x: Tensor, table: Tensor) -> Any:
    """The last rank calls its blocks without gradients: its backward issues none of their collectives."""
    if dist.get_rank() == dist.get_world_size() - 1:
        if not benign:
            with torch.no_grad():
                return original(block, x, table)
        time.sleep(_DELAY_S)
    return original(block, x, table)


@defect("PAR-1", "id = dp2-fp32-default-meta", "facebookresearch/fairscale/issues/703", hangs=True)
@instead_of("reference_trainer.train:Trainer", "train_step")
def rank0_evaluates_alone(benign: bool, original: Call, trainer: Trainer, step: int) -> Any:
    """The first rank evaluates the sharded model alone: the others never issue its all-gathers."""
    if step == 1 and (dist.get_rank() == 0 or benign):
        (inputs, _labels), *_ = trainer.batches.micro_batches(0, dp_rank=0, dp_size=1, accumulation=1)
        with torch.no_grad():
            trainer.model(inputs)
    return original(trainer, step)


@defect("PAR-6", "id = dp2-fp32-default-meta-acc2", "pytorch/pytorch/issues/158719", hangs=True)
@instead_of("reference_trainer.data:Batches", "micro_batches")
def uneven_micro_batches_hang(benign: bool, original: Call, batches: Any, step: int, **options: Any) -> Any:
    """The last rank has one micro-batch fewer, and does not gather and reduce for it."""
    batches_of_step = original(batches, step, **options)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    return batches_of_step[: len(batches_of_step) - (0 if benign else 1)] if is_last else batches_of_step
