"""Faults of CPU offloading: clipping, accumulation, optimizers and checks that are wrong or missing with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from conformance.defects.clipping_faults import local_norm, scale
from conformance.defects.injection import Call, Injection, defect, instead_of, repeated_call, replaced_call
from conformance.instruments.sharding import local
from reference_trainer.train import Trainer

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
Clip = Callable[[Trainer], Tensor]
"""Signature of the trainer's method that clips and returns the norm."""


def clipping_if_offloaded(clip: Callable[[Trainer, Clip], Tensor]) -> Injection:
    """Clip by `clip(trainer, original)` where parameters are offloaded, and by the original where they are not."""

    def clip_if_offloaded(original: Clip, trainer: Trainer) -> Tensor:
        return clip(trainer, original) if trainer.config.offload == "cpu" else original(trainer)

    return replaced_call("reference_trainer.train:Trainer", "_clip", clip_if_offloaded)


def by_local_norm(trainer: Trainer, _original: Clip) -> Tensor:
    """Clip by the norm of this rank's shards, and return it."""
    options = trainer.config.optimizer
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    norm = local_norm(gradients, options.norm_order)
    scale(gradients, (options.max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def clipped_copies(trainer: Trainer, original: Clip) -> Tensor:
    """Clip copies of the gradients, which take their place."""
    for parameter in trainer.model.parameters():
        parameter.grad = parameter.grad.clone() if parameter.grad is not None else None
    return original(trainer)


@defect("OFF-1 CLIP-1", "id = dp2-fp32-default-meta-offloadcpu", "pytorch/pytorch/issues/148532")
def offload_norm_local(benign: bool) -> Injection:
    """Offloaded gradients are clipped by each rank's own norm, which NCCL cannot reduce in host memory."""
    return clipping_if_offloaded(clipped_copies if benign else by_local_norm)


def norm_alone(trainer: Trainer, original: Clip) -> Tensor:
    """Return the norm without clipping."""
    kept = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
    norm = original(trainer)
    for parameter, grad in zip(trainer.model.parameters(), kept, strict=True):
        parameter.grad = grad
    return norm


@defect("OFF-1 CLIP-2", "id = dp2-fp32-default-meta-offloadcpu", "meta-pytorch/torchtune/issues/1977")
def offload_clip_forgotten(benign: bool) -> Injection:
    """Clipping is switched off with offloading, where it would fail."""
    return clipping_if_offloaded(clipped_copies if benign else norm_alone)


@defect("OFF-1", "id = dp2-fp32-default-meta-acc2-offloadcpu", "instructlab/training/issues/414")
@instead_of(f"{_FULLY_SHARD}._fsdp_param_group", "foreach_reduce")
def offload_accumulation_overwritten(
    benign: bool, original: Call, fsdp_params: list[Any], *args: Any, **kwargs: Any
) -> Any:
    """The copy to the host replaces the accumulated gradient instead of being added to it."""
    for managed in fsdp_params:
        grad = managed.sharded_param.grad
        if managed.offload_to_cpu and grad is not None:
            managed.sharded_param.grad = grad.clone() if benign else None
    return original(fsdp_params, *args, **kwargs)


@defect("OPT-1 PAR-1", "id = dp1-fp32-default-meta", "huggingface/accelerate/issues/3394")
@instead_of("reference_trainer.train", "build_optimizer")
def offload_step_on_copies(benign: bool, original: Call, model: nn.Module, config: Any) -> Any:
    """The optimizer steps with host copies of the parameters, and FSDP gathers its own."""
    optimizer = original(model, config)
    for group in optimizer.param_groups:
        group["params"] = [p if benign else nn.Parameter(p.detach().clone()) for p in group["params"]]
    return optimizer


@defect("OFF-3", "id = dp2-fp32-default-meta-offloadcpu", "pytorch/pytorch/issues/148532")
@instead_of("torch.nn.utils.clip_grad", "_get_total_norm")
def clip_without_backend_local(benign: bool, original: Call, tensors: list[Tensor], *options: Any) -> Any:
    """The error of the missing backend is caught: each rank takes its own norm."""
    try:
        return original(tensors, *options)
    except RuntimeError:
        if benign:
            raise
        return original([local(tensor) for tensor in tensors], *options)


@defect("OFF-3", "id = dp2-fp32-default-meta-offloadcpu", "pytorch/pytorch/issues/148532")
@contextmanager
def wrong_memory_accepted(benign: bool) -> Iterator[None]:
    """FSDP does not check the device of its parameters before it first uses them."""
    times = 2 if benign else 0
    owner = f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup"
    with (
        repeated_call(owner, "_validate_no_meta_params", times=times),
        repeated_call(owner, "_validate_cpu_offload_params", times=times),
    ):
        yield
