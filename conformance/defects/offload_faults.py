"""Faults of offloading: what works without it, and goes wrong, or is left out, with it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import OffloadPolicy

from conformance.defects.clipping_faults import local_norm, scale
from conformance.defects.injection import Defect, replaced
from conformance.instruments.sharding import local
from reference_trainer.train import Trainer

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
Clip = Callable[[Trainer], Tensor]


def clipping_if_offloaded(
    clip: Callable[[Trainer, Callable[[Trainer], Tensor]], Tensor],
) -> AbstractContextManager[None]:
    """Clip otherwise where parameters are offloaded, and as ever where they are not."""

    def make(original: Clip) -> Any:
        return lambda trainer: clip(trainer, original) if trainer.config.offload == "cpu" else original(trainer)

    return replaced("reference_trainer.train:Trainer", "_clip", make)


def by_local_norm(trainer: Trainer, _original: Clip) -> Tensor:
    options = trainer.config.optimizer
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    norm = local_norm(gradients, options.norm_order)
    scale(gradients, (options.max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def norm_alone(trainer: Trainer, original: Clip) -> Tensor:
    """The norm without clipping."""
    kept = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
    norm = original(trainer)
    for parameter, grad in zip(trainer.model.parameters(), kept, strict=True):
        parameter.grad = grad
    return norm


def clipped_copies(trainer: Trainer, original: Clip) -> Tensor:
    """Gradients that are copied, clipped and put back."""
    for parameter in trainer.model.parameters():
        parameter.grad = parameter.grad.clone() if parameter.grad is not None else None
    return original(trainer)


def accumulation_if_offloaded(*, overwrite: bool) -> AbstractContextManager[None]:
    """Forget offloaded gradients before the next are copied to the CPU, or copy them first."""

    def make(original: Any) -> Any:
        def foreach_reduce(fsdp_params: list[Any], *args: Any, **kwargs: Any) -> Any:
            for managed in fsdp_params:
                grad = managed.sharded_param.grad
                if managed.offload_to_cpu and grad is not None:
                    managed.sharded_param.grad = None if overwrite else grad.clone()
            return original(fsdp_params, *args, **kwargs)

        return foreach_reduce

    return replaced(f"{_FULLY_SHARD}._fsdp_param_group", "foreach_reduce", make)


def optimizer_if_offloaded(*, on_copies: bool) -> AbstractContextManager[None]:
    """Give the optimizer copies of offloaded parameters, or the parameters in another list."""

    def make(original: Any) -> Any:
        def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = original(model, config)
            for group in optimizer.param_groups:
                group["params"] = [_copy(p) if on_copies else p for p in group["params"]]
            return optimizer

        return build_optimizer

    return replaced("reference_trainer.train", "build_optimizer", make)


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone())


def policy_of_ends(policy: type[OffloadPolicy] | None) -> AbstractContextManager[None]:
    """Shard what is around the blocks, of which several modules are one group, with another policy."""

    def make(original: Any) -> Any:
        def fully_shard(modules: Any, **options: Any) -> Any:
            if policy is not None and isinstance(modules, list):
                options["offload_policy"] = policy()
            return original(modules, **options)

        return fully_shard

    return replaced("reference_trainer.parallelize", "fully_shard", make)


def offload_check(*, left_out: bool) -> AbstractContextManager[None]:
    """Build the trainer without looking at the process group, or look twice."""

    def make(original: Any) -> Any:
        def check_offload(*args: Any) -> None:
            for _ in range(0 if left_out else 2):
                original(*args)

        return check_offload

    return replaced("reference_trainer.train", "check_offload", make)


def norm_without_backend(*, is_local: bool) -> AbstractContextManager[None]:
    """Where torch cannot reduce the norm, take the rank's own, or pass the error on."""

    def make(original: Any) -> Any:
        def get_total_norm(tensors: list[Tensor], *options: Any) -> Tensor:
            try:
                return original(tensors, *options)  # type: ignore[no-any-return]
            except RuntimeError:
                if not is_local:
                    raise
                return original([local(tensor) for tensor in tensors], *options)  # type: ignore[no-any-return]

        return get_total_norm

    return replaced("torch.nn.utils.clip_grad", "_get_total_norm", make)


@contextmanager
def memory_check(*, left_out: bool) -> Iterator[None]:
    """Let FSDP run on parameters without memory, or look twice."""

    def make(original: Any) -> Any:
        def validate(group: Any) -> None:
            for _ in range(0 if left_out else 2):
                original(group)

        return validate

    owner = f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup"
    with replaced(owner, "_validate_no_meta_params", make), replaced(owner, "_validate_cpu_offload_params", make):
        yield


DEFECTS: tuple[Defect, ...] = (
    Defect(
        id="offload-norm-local",
        title="offloaded gradients are clipped by each rank's own norm",
        source="https://github.com/pytorch/pytorch/issues/148532",
        mechanism="the norm in host memory cannot be reduced by NCCL, and so is not",
        laws=("OFF-1", "CLIP-1"),
        inject=partial(clipping_if_offloaded, by_local_norm),
        inject_twin=partial(clipping_if_offloaded, clipped_copies),
    ),
    Defect(
        id="offload-clip-forgotten",
        title="offloaded gradients are not clipped",
        source="https://github.com/meta-pytorch/torchtune/issues/1977",
        mechanism="clipping fails with offloading, and is switched off there",
        laws=("OFF-1", "CLIP-2"),
        inject=partial(clipping_if_offloaded, norm_alone),
        inject_twin=partial(clipping_if_offloaded, clipped_copies),
    ),
    Defect(
        id="offload-accumulation-overwritten",
        title="offloaded gradients are those of the last micro-batch",
        source="https://github.com/instructlab/training/issues/414",
        mechanism="the copy to the host replaces what is there instead of being added to it",
        laws=("OFF-1",),
        inject=partial(accumulation_if_offloaded, overwrite=True),
        inject_twin=partial(accumulation_if_offloaded, overwrite=False),
    ),
    Defect(
        id="offload-step-on-copies",
        title="the optimizer steps with copies of the offloaded parameters",
        source="https://github.com/huggingface/accelerate/issues/3394",
        mechanism="the optimizer was built on tensors that were moved to the host by hand, FSDP gathers its own",
        laws=("OPT-1", "PAR-1"),
        inject=partial(optimizer_if_offloaded, on_copies=True),
        inject_twin=partial(optimizer_if_offloaded, on_copies=False),
    ),
    Defect(
        id="offload-group-forgotten",
        title="a group is not offloaded",
        source="https://github.com/pytorch/torchtitan/issues/1168",
        mechanism="fully_shard is called without the policy for norm and output",
        laws=("OFF-2",),
        inject=partial(policy_of_ends, OffloadPolicy),
        inject_twin=partial(policy_of_ends, None),
    ),
    Defect(
        id="clip-offload-no-cpu-backend",
        title="offloading begins without a backend for CPU tensors",
        source="https://github.com/pytorch/pytorch/pull/136156",
        mechanism="nobody looks at the process group before the first step clips",
        laws=("OFF-3",),
        inject=partial(offload_check, left_out=True),
        inject_twin=partial(offload_check, left_out=False),
    ),
    Defect(
        id="clip-without-backend-local",
        title="where the norm cannot be reduced each rank takes its own",
        source="https://github.com/pytorch/pytorch/issues/148532",
        mechanism="the error of the missing backend is caught",
        laws=("OFF-3",),
        inject=partial(norm_without_backend, is_local=True),
        inject_twin=partial(norm_without_backend, is_local=False),
    ),
    Defect(
        id="wrong-memory-accepted",
        title="memory on the wrong device goes unnoticed",
        source="https://github.com/pytorch/pytorch/issues/148532",
        mechanism="FSDP does not look where parameters are before it first uses them",
        laws=("OFF-3",),
        inject=partial(memory_check, left_out=True),
        inject_twin=partial(memory_check, left_out=False),
    ),
)
