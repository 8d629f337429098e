"""Faults of loss scaling: who decides that a step is skipped, what is done with scaled gradients, and what is saved."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import get_state_dict

from conformance.defects.checkpoint_faults import after_resume
from conformance.defects.injection import Defect, replaced
from conformance.instruments.sharding import local
from reference_trainer.loss_scale import LossScaler
from reference_trainer.train import Trainer

_SCALER = "reference_trainer.loss_scale:LossScaler"


def clipped_while_scaled(*, clips: bool) -> AbstractContextManager[None]:
    """Clip gradients that are scaled, and unscale them then; or scale and unscale them before they are clipped."""

    def make(original: Any) -> Any:
        def clip(trainer: Trainer) -> Tensor:
            scale = trainer.scaler.get_scale()
            _multiply(trainer, scale)
            norm: Tensor | None = original(trainer) if clips else None
            _multiply(trainer, 1.0 / scale)
            return original(trainer) if norm is None else norm

        return clip

    return replaced("reference_trainer.train:Trainer", "_clip", make)


def _multiply(trainer: Trainer, factor: float) -> None:
    for grad in _gradients(trainer.optimizer):
        local(grad).mul_(factor)


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return (p.grad for p in parameters if p.grad is not None)


def judged_locally(*, asks: bool) -> AbstractContextManager[None]:
    """Look for overflow in this rank's parts, and ask the other ranks as always, or not."""

    def make(original: Any) -> Any:
        def unscale(
            scaler: LossScaler, optimizer: torch.optim.Optimizer, inverse: Tensor, found: Tensor, *args: Any
        ) -> dict[torch.device, Tensor]:
            parts = [local(grad) for grad in _gradients(optimizer)]
            bad = any(not part.isfinite().all() for part in parts)
            if asks:
                result: dict[torch.device, Tensor] = original(scaler, optimizer, inverse, found, *args)
                return result
            for part in parts:
                part.mul_(inverse)
            return {found.device: found.fill_(float(bad))}

        return unscale

    return replaced(_SCALER, "_unscale_grads_", make)


def judged_by_torch(*, asks: bool) -> AbstractContextManager[None]:
    """What torch's own scaler finds, without the trainer's question to all ranks; or with it, asked twice."""

    def make(original: Any) -> Any:
        def unscale(scaler: LossScaler, *args: Any) -> dict[torch.device, Tensor]:
            found: dict[torch.device, Tensor] = (original if asks else GradScaler._unscale_grads_)(scaler, *args)
            return found

        return unscale

    return replaced(_SCALER, "_unscale_grads_", make)


def loss_scaled_by(factor: float) -> AbstractContextManager[None]:
    """Of the scale, by which gradients are divided."""

    def make(original: Any) -> Any:
        def scale(scaler: LossScaler, loss: Tensor) -> Tensor:
            scaled: Tensor = original(scaler, loss)
            return scaled * factor if scaler.is_enabled() else scaled

        return scale

    return replaced(_SCALER, "scale", make)


def built(*, enabled: bool) -> AbstractContextManager[None]:
    """Build a scaler that works as configured, or one that does nothing."""

    def make(original: Any) -> Any:
        def build(scaler: LossScaler, *args: Any) -> None:
            original(scaler, *args)
            if not enabled:
                GradScaler.__init__(scaler, enabled=False)

        return build

    return replaced(_SCALER, "__init__", make)


def scale_begins_anew(trainer: Trainer, *, forget: bool) -> None:
    """Or hand its own state over again."""
    state = trainer.scaler.state_dict()
    fresh = LossScaler(trainer.config, trainer.device).state_dict()
    trainer.scaler.load_state_dict(fresh if forget else state)


def optimizer_state(*, twice: bool) -> AbstractContextManager[None]:
    """What is saved of an optimizer that has not stepped yet: as torch makes it up, or as it is, taken twice."""

    def make(original: Any) -> Any:
        def state_dicts(trainer: Trainer) -> Any:
            if not twice:
                return get_state_dict(trainer.model, trainer.optimizer)
            original(trainer)
            return original(trainer)

        return state_dicts

    return replaced("reference_trainer.checkpoint", "_state_dicts", make)


DEFECTS = (
    Defect(
        id="clip-before-unscale",
        title="gradients are clipped while they are scaled",
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/9599",
        mechanism="gradients are multiplied by the scale before they are clipped, and divided by it afterwards",
        laws=("PAR-2",),
        inject=partial(clipped_while_scaled, clips=True),
        inject_twin=partial(clipped_while_scaled, clips=False),
    ),
    Defect(
        id="overflow-judged-locally",
        title="each rank skips a step if gradients overflow in its own shards",
        source="https://github.com/pytorch/pytorch/pull/132816",
        mechanism="the scaler looks into local tensors, and asks no other rank",
        laws=("AMP-1",),
        inject=partial(judged_locally, asks=False),
        inject_twin=partial(judged_locally, asks=True),
    ),
    Defect(
        id="overflow-judged-by-replica",
        title="each replica skips a step if gradients overflow in its own",
        source="https://github.com/pytorch/pytorch/pull/132816",
        mechanism="torch's scaler asks the ranks among which the first gradient is divided, and nobody asks the others",
        laws=("AMP-1", "MP-4"),
        inject=partial(judged_by_torch, asks=False),
        inject_twin=partial(judged_by_torch, asks=True),
    ),
    Defect(
        id="loss-scaler-left-out",
        title="fp16 is computed in without a scaler",
        source="https://github.com/pytorch/torchtitan/pull/2363",
        mechanism="the scaler that is built is not enabled",
        laws=("AMP-2", "MP-4", "AXIS-1"),
        inject=partial(built, enabled=False),
        inject_twin=partial(built, enabled=True),
    ),
    Defect(
        id="unscaled-by-another-scale",
        title="gradients are divided by twice the scale that the loss was multiplied with",
        source="https://github.com/deepspeedai/DeepSpeed/pull/8588",
        mechanism="the loss is multiplied by half of the scale",
        laws=("PAR-2", "AMP-3"),
        inject=partial(loss_scaled_by, 0.5),
        inject_twin=partial(loss_scaled_by, 1.0),
    ),
    Defect(
        id="resume-loss-scale-lost",
        title="a resumed run begins with the initial loss scale",
        source="https://github.com/huggingface/accelerate/issues/4289",
        mechanism="the scaler's state is that of a new one after it was loaded",
        laws=("CKPT-1",),
        inject=partial(after_resume, partial(scale_begins_anew, forget=True)),
        inject_twin=partial(after_resume, partial(scale_begins_anew, forget=False)),
    ),
    Defect(
        id="saving-counts-a-step",
        title="saving before the first step that is not skipped makes the optimizer count one",
        source="https://github.com/pytorch/pytorch/issues/164929",
        mechanism="get_state_dict lets the optimizer step with gradients of zero, and its counter is saved",
        laws=("CKPT-1",),
        inject=partial(optimizer_state, twice=False),
        inject_twin=partial(optimizer_state, twice=True),
    ),
)
