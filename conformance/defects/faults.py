"""The faults themselves: what each defect, and its benign twin, puts in the place of the original."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial
from torch.nn.utils import clip_grads_with_norm_

from conformance.defects.injection import replaced
from conformance.instruments.sharding import local
from reference_trainer.model import Transformer
from reference_trainer.train import Trainer

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"


def divide_factors(*, divide: bool) -> AbstractContextManager[None]:
    """Reduce with SUM, and divide by the number of ranks afterwards or not at all."""

    def make(_original: Any) -> Any:
        def factors(reduce_scatter_group: Any, all_reduce_group: Any, *_args: Any, **_kwargs: Any) -> tuple[Any, ...]:
            groups = [group for group in (reduce_scatter_group, all_reduce_group) if group is not None]
            ranks = 1
            for group in groups:
                ranks *= group.size()
            return None, float(ranks) if divide else None, dist.ReduceOp.SUM, dist.ReduceOp.SUM

        return factors

    return replaced(f"{_FULLY_SHARD}._fsdp_collectives", "_get_gradient_divide_factors", make)


def clipping(norm_of: Callable[[list[Tensor]], Tensor]) -> AbstractContextManager[None]:
    """Clip with a norm that is computed by hand."""

    def make(_original: Any) -> Any:
        def clip_gradients(parameters: Iterable[nn.Parameter], *, max_norm: float) -> Tensor:
            parameters = list(parameters)
            norm = norm_of([p.grad for p in parameters if p.grad is not None])
            if max_norm > 0:
                clip_grads_with_norm_(parameters, max_norm, norm)
            return norm

        return clip_gradients

    return replaced("reference_trainer.train", "clip_gradients", make)


def local_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of this rank's shards alone."""
    return torch.stack([local(grad).square().sum() for grad in gradients]).sum().sqrt()


def reduced_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of the full gradients: squares of the shards, summed over the ranks that hold different shards."""
    squares = torch.zeros(())
    for grad in gradients:
        square = local(grad).square().sum()
        if isinstance(grad, DTensor):
            placements = [p if p.is_replicate() else Partial() for p in grad.placements]
            square = DTensor.from_local(square, grad.device_mesh, placements).full_tensor()
        squares += square
    return squares.sqrt()


def rope_buffer(*, restore: bool) -> AbstractContextManager[None]:
    """After initialisation put the memory of `to_empty` back into the RoPE buffer, or initialise a second time."""

    def make(original: Any) -> Any:
        def init_weights(model: Transformer, *, seed: int) -> None:
            memory = model.rope_table.clone()
            original(model, seed=seed)
            if restore:
                model.rope_table.copy_(memory)
            else:
                original(model, seed=seed)

        return init_weights

    return replaced("reference_trainer.train", "init_weights", make)


def reduce_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Reduce the gradients of bf16 computation in `dtype`."""

    def make(original: Any) -> Any:
        def policy(precision: str) -> MixedPrecisionPolicy:
            if precision == "fp32":
                return original(precision)  # type: ignore[no-any-return]
            return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype, cast_forward_inputs=False)

        return policy

    return replaced("reference_trainer.parallelize", "mixed_precision_policy", make)


def reshard(*, skip_in_forward: bool) -> AbstractContextManager[None]:
    """Do not free a group after forward, or (which changes nothing) free it twice."""

    def make(original: Any) -> Any:
        def wrapped(group: Any) -> None:
            if skip_in_forward and group._training_state.name == "FORWARD":
                return
            original(group)
            if not skip_in_forward:
                original(group)

        return wrapped

    return replaced(f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup", "reshard", make)


def replica_scale(factor: float) -> AbstractContextManager[None]:
    """After initialisation scale the parameters of the second replica."""

    def make(original: Any) -> Any:
        def init_weights(model: Transformer, *, seed: int) -> None:
            original(model, seed=seed)
            for parameter in model.parameters():
                mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
                if mesh and "dp_replicate" in (mesh.mesh_dim_names or ()) and mesh.get_local_rank("dp_replicate") == 1:
                    local(parameter).mul_(factor)

        return init_weights

    return replaced("reference_trainer.train", "init_weights", make)


def shard_draw(elements_of: Callable[[DTensor], Tensor]) -> AbstractContextManager[None]:
    """Give each shard the elements of the full initial tensor that `elements_of` names."""

    def make(original: Any) -> Any:
        def assign(target: Tensor, value: Tensor) -> None:
            if isinstance(target, DTensor):
                local(target).copy_(value.flatten()[elements_of(target)])
            else:
                original(target, value)

        return assign

    return replaced("reference_trainer.init_weights", "_assign", make)


def first_elements(parameter: DTensor) -> Tensor:
    """As if every rank drew its shard from the same generator."""
    shape = local(parameter).shape
    return torch.arange(shape.numel()).view(shape)


def tensor_parallel_gradient(*, reduce: bool) -> AbstractContextManager[None]:
    """Take a tensor-parallel gradient as it is, a partial sum, or reduce it before FSDP does."""

    def make(original: Any) -> Any:
        def inner(param: Any, grad: Tensor) -> Tensor:
            if not isinstance(grad, DTensor):
                return original(param, grad)  # type: ignore[no-any-return]
            if reduce:
                return original(param, grad.redistribute(placements=param._unsharded_dtensor_spec.placements))  # type: ignore[no-any-return]
            return grad.to_local()

        return inner

    return replaced(f"{_FULLY_SHARD}._fsdp_param:FSDPParam", "_get_grad_inner_tensor", make)


def before_step(*, evaluate: bool) -> AbstractContextManager[None]:
    """Between backward and the optimizer's step run the model without gradients, or free what is free already.

    The twin does not evaluate: even if all is freed afterwards, torch 2.13 gathers once more in the next step.
    """

    def make(original: Any) -> Any:
        def forward_backward(trainer: Trainer, inputs: Tensor, labels: Tensor, **kwargs: int) -> Tensor:
            loss: Tensor = original(trainer, inputs, labels, **kwargs)
            # Not part of the forward and backward that are judged.
            trainer.observer.phase("data", step=kwargs["step"])
            if evaluate:
                with torch.no_grad():
                    trainer.model(inputs)
                return loss
            for module in trainer.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            return loss

        return forward_backward

    return replaced("reference_trainer.train:Trainer", "_forward_backward", make)


bf16_reduce = partial(reduce_dtype, torch.bfloat16)
fp32_reduce = partial(reduce_dtype, torch.float32)
