"""Faults of CPU offloading: what works without offloading, and goes wrong, or is left out, with it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import OffloadPolicy

from conformance.defects.clipping_faults import local_norm, scale
from conformance.defects.injection import Defect, repeated_call, replaced_call
from conformance.instruments.sharding import local
from reference_trainer.train import Trainer

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
Clip = Callable[[Trainer], Tensor]
"""Signature of the trainer's method that clips and returns the norm."""


def clipping_if_offloaded(clip: Callable[[Trainer, Clip], Tensor]) -> AbstractContextManager[None]:
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


OFFLOAD_NORM_LOCAL = Defect(
    id="offload-norm-local",
    title="offloaded gradients are clipped by each rank's own norm",
    source="https://github.com/pytorch/pytorch/issues/148532",
    mechanism="the norm in host memory cannot be reduced by NCCL, and so is not",
    laws=("OFF-1", "CLIP-1"),
    cells="id = dp2-fp32-default-meta-offloadcpu",
    inject=partial(clipping_if_offloaded, by_local_norm),
    inject_twin=partial(clipping_if_offloaded, clipped_copies),
)


def norm_alone(trainer: Trainer, original: Clip) -> Tensor:
    """Return the norm without clipping."""
    kept = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
    norm = original(trainer)
    for parameter, grad in zip(trainer.model.parameters(), kept, strict=True):
        parameter.grad = grad
    return norm


OFFLOAD_CLIP_FORGOTTEN = Defect(
    id="offload-clip-forgotten",
    title="offloaded gradients are not clipped",
    source="https://github.com/meta-pytorch/torchtune/issues/1977",
    mechanism="clipping fails with offloading, and is switched off there",
    laws=("OFF-1", "CLIP-2"),
    cells="id = dp2-fp32-default-meta-offloadcpu",
    inject=partial(clipping_if_offloaded, norm_alone),
    inject_twin=partial(clipping_if_offloaded, clipped_copies),
)


def accumulation_if_offloaded(*, overwrite: bool) -> AbstractContextManager[None]:
    """Forget offloaded gradients before the next ones are copied to the CPU, or copy them first."""

    def foreach_reduce(original: Callable[..., Any], fsdp_params: list[Any], *args: Any, **kwargs: Any) -> Any:
        for managed in fsdp_params:
            grad = managed.sharded_param.grad
            if managed.offload_to_cpu and grad is not None:
                managed.sharded_param.grad = None if overwrite else grad.clone()
        return original(fsdp_params, *args, **kwargs)

    return replaced_call(f"{_FULLY_SHARD}._fsdp_param_group", "foreach_reduce", foreach_reduce)


OFFLOAD_ACCUMULATION_OVERWRITTEN = Defect(
    id="offload-accumulation-overwritten",
    title="offloaded gradients are those of the last micro-batch",
    source="https://github.com/instructlab/training/issues/414",
    mechanism="the copy to the host replaces the gradient that is there instead of being added to it",
    laws=("OFF-1",),
    cells="id = dp2-fp32-default-meta-acc2-offloadcpu",
    inject=partial(accumulation_if_offloaded, overwrite=True),
    inject_twin=partial(accumulation_if_offloaded, overwrite=False),
)


def optimizer_parameters(*, copied: bool) -> AbstractContextManager[None]:
    """Give the optimizer copies of its parameters, or the parameters in another list."""

    def build_optimizer(
        original: Callable[..., torch.optim.Optimizer], model: nn.Module, config: Any
    ) -> torch.optim.Optimizer:
        optimizer = original(model, config)
        for group in optimizer.param_groups:
            group["params"] = [_copy(p) if copied else p for p in group["params"]]
        return optimizer

    return replaced_call("reference_trainer.train", "build_optimizer", build_optimizer)


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone())


OFFLOAD_STEP_ON_COPIES = Defect(
    id="offload-step-on-copies",
    title="the optimizer steps with copies of the offloaded parameters",
    source="https://github.com/huggingface/accelerate/issues/3394",
    mechanism="the optimizer is built on tensors that were copied to the host manually, FSDP gathers its own",
    laws=("OPT-1", "PAR-1"),
    cells="id = dp1-fp32-default-meta",
    inject=partial(optimizer_parameters, copied=True),
    inject_twin=partial(optimizer_parameters, copied=False),
)


def policy_of_ends(policy: type[OffloadPolicy] | None) -> AbstractContextManager[None]:
    """Shard the group of several modules, norm and output, with another offload policy; None leaves it as it is."""

    def fully_shard(original: Callable[..., Any], modules: Any, **options: Any) -> Any:
        if policy is not None and isinstance(modules, list):
            options["offload_policy"] = policy()
        return original(modules, **options)

    return replaced_call("reference_trainer.parallelize", "fully_shard", fully_shard)


OFFLOAD_GROUP_FORGOTTEN = Defect(
    id="offload-group-forgotten",
    title="a group is not offloaded",
    source="https://github.com/pytorch/torchtitan/issues/1168",
    mechanism="fully_shard is called without the policy for norm and output",
    laws=("OFF-2",),
    cells="id = dp2-fp32-default-meta-offloadcpu",
    inject=partial(policy_of_ends, OffloadPolicy),
    inject_twin=partial(policy_of_ends, None),
)


CLIP_OFFLOAD_NO_CPU_BACKEND = Defect(
    id="clip-offload-no-cpu-backend",
    title="offloading begins without a backend for CPU tensors",
    source="https://github.com/pytorch/pytorch/pull/136156",
    mechanism="nobody checks the process group before the first step clips",
    laws=("OFF-3",),
    cells="id = dp2-fp32-default-meta-offloadcpu",
    inject=partial(repeated_call, "reference_trainer.train", "check_offload", times=0),
    inject_twin=partial(repeated_call, "reference_trainer.train", "check_offload", times=2),
)


def norm_without_backend(*, is_local: bool) -> AbstractContextManager[None]:
    """Take this rank's own norm where torch cannot reduce it, or raise the error again."""

    def get_total_norm(original: Callable[..., Tensor], tensors: list[Tensor], *options: Any) -> Tensor:
        try:
            return original(tensors, *options)
        except RuntimeError:
            if not is_local:
                raise
            return original([local(tensor) for tensor in tensors], *options)

    return replaced_call("torch.nn.utils.clip_grad", "_get_total_norm", get_total_norm)


CLIP_WITHOUT_BACKEND_LOCAL = Defect(
    id="clip-without-backend-local",
    title="each rank takes its own norm where the norm cannot be reduced",
    source="https://github.com/pytorch/pytorch/issues/148532",
    mechanism="the error of the missing backend is caught",
    laws=("OFF-3",),
    cells="id = dp2-fp32-default-meta-offloadcpu",
    inject=partial(norm_without_backend, is_local=True),
    inject_twin=partial(norm_without_backend, is_local=False),
)


@contextmanager
def device_checks(*, times: int) -> Iterator[None]:
    """Let FSDP check the devices of its parameters before it first uses them as often as `times` says."""
    owner = f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup"
    with (
        repeated_call(owner, "_validate_no_meta_params", times=times),
        repeated_call(owner, "_validate_cpu_offload_params", times=times),
    ):
        yield


WRONG_MEMORY_ACCEPTED = Defect(
    id="wrong-memory-accepted",
    title="memory on the wrong device goes unnoticed",
    source="https://github.com/pytorch/pytorch/issues/148532",
    mechanism="FSDP does not look where parameters are before it first uses them",
    laws=("OFF-3",),
    cells="id = dp2-fp32-default-meta-offloadcpu",
    inject=partial(device_checks, times=0),
    inject_twin=partial(device_checks, times=2),
)
