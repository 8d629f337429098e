"""Faults of loss scaling: which ranks skip a step, what is done with scaled gradients, and what is saved."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import get_state_dict

from conformance.defects.checkpoint_faults import after_resume
from conformance.defects.injection import Defect, replaced_call
from conformance.instruments.sharding import local
from reference_trainer.loss_scale import LossScaler
from reference_trainer.train import Trainer

_SCALER = "reference_trainer.loss_scale:LossScaler"
OverflowByDevice = dict[torch.device, Tensor]
"""Result of `GradScaler._unscale_grads_`: a scalar that is not 0 if gradients on that device overflow."""


def clipped_while_scaled(*, clips: bool) -> AbstractContextManager[None]:
    """Clip gradients that are scaled, and unscale them then; or scale and unscale them before they are clipped."""

    def clip(original: Callable[[Trainer], Tensor], trainer: Trainer) -> Tensor:
        scale = trainer.scaler.get_scale()
        _multiply(trainer, scale)
        norm = original(trainer) if clips else None
        _multiply(trainer, 1.0 / scale)
        return original(trainer) if norm is None else norm

    return replaced_call("reference_trainer.train:Trainer", "_clip", clip)


def _multiply(trainer: Trainer, factor: float) -> None:
    for grad in _gradients(trainer.optimizer):
        local(grad).mul_(factor)


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return (p.grad for p in parameters if p.grad is not None)


CLIP_BEFORE_UNSCALE = Defect(
    id="clip-before-unscale",
    title="gradients are clipped while they are scaled",
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/9599",
    mechanism="gradients are multiplied by the scale before they are clipped, and divided by it afterwards",
    laws=("PAR-2",),
    cells="id = dp2-fp16mp-default-meta",
    inject=partial(clipped_while_scaled, clips=True),
    inject_twin=partial(clipped_while_scaled, clips=False),
)


def overflow_in_shards(*, agreed: bool) -> AbstractContextManager[None]:
    """Look for overflow in this rank's shards, and let all ranks agree as the original does, or not."""

    def unscale(
        original: Callable[..., OverflowByDevice],
        scaler: LossScaler,
        optimizer: torch.optim.Optimizer,
        inverse: Tensor,
        overflow: Tensor,
        *args: Any,
    ) -> OverflowByDevice:
        shards = [local(grad) for grad in _gradients(optimizer)]
        overflows = any(not shard.isfinite().all() for shard in shards)
        if agreed:
            return original(scaler, optimizer, inverse, overflow, *args)
        for shard in shards:
            shard.mul_(inverse)
        return {overflow.device: overflow.fill_(float(overflows))}

    return replaced_call(_SCALER, "_unscale_grads_", unscale)


OVERFLOW_JUDGED_LOCALLY = Defect(
    id="overflow-judged-locally",
    title="each rank skips a step if gradients overflow in its own shards",
    source="https://github.com/pytorch/pytorch/pull/132816",
    mechanism="the scaler looks into local tensors, and asks no other rank",
    laws=("AMP-1",),
    cells="id = dp2-fp16mp-default-meta",
    inject=partial(overflow_in_shards, agreed=False),
    inject_twin=partial(overflow_in_shards, agreed=True),
)


def overflow_by_torch(*, agreed: bool) -> AbstractContextManager[None]:
    """Take the overflow that torch's own scaler reports, or that all ranks agree on as the trainer's scaler does."""

    def unscale(original: Callable[..., OverflowByDevice], scaler: LossScaler, *args: Any) -> OverflowByDevice:
        return original(scaler, *args) if agreed else GradScaler._unscale_grads_(scaler, *args)

    return replaced_call(_SCALER, "_unscale_grads_", unscale)


OVERFLOW_JUDGED_BY_REPLICA = Defect(
    id="overflow-judged-by-replica",
    title="each replica skips a step if gradients overflow in its own",
    source="https://github.com/pytorch/pytorch/pull/132816",
    mechanism="torch's scaler asks the ranks over which the first gradient is sharded, and nobody asks the others",
    laws=("AMP-1", "MP-4"),
    cells="id in (hsdp2x2-fp16reduce-default-meta, pp2-dp2-fp16mp-default-meta-cut-acc4-interleavedzerobubble)",
    inject=partial(overflow_by_torch, agreed=False),
    inject_twin=partial(overflow_by_torch, agreed=True),
)


def scaler_built(*, enabled: bool) -> AbstractContextManager[None]:
    """Build a scaler that works as configured, or one that does nothing."""

    def init(original: Callable[..., None], scaler: LossScaler, *args: Any) -> None:
        original(scaler, *args)
        if not enabled:
            GradScaler.__init__(scaler, enabled=False)

    return replaced_call(_SCALER, "__init__", init)


LOSS_SCALER_LEFT_OUT = Defect(
    id="loss-scaler-left-out",
    title="a run computes in fp16 without a scaler",
    source="https://github.com/pytorch/torchtitan/pull/2363",
    mechanism="the scaler that is built is not enabled",
    laws=("AMP-2", "MP-4", "AXIS-1"),
    cells="id = dp2-fp16mp-default-meta",
    inject=partial(scaler_built, enabled=False),
    inject_twin=partial(scaler_built, enabled=True),
)


def loss_scaled_by(factor: float) -> AbstractContextManager[None]:
    """Multiply the loss by this multiple of the scale, by which gradients are divided."""

    def scale(original: Callable[[LossScaler, Tensor], Tensor], scaler: LossScaler, loss: Tensor) -> Tensor:
        scaled = original(scaler, loss)
        return scaled * factor if scaler.is_enabled() else scaled

    return replaced_call(_SCALER, "scale", scale)


UNSCALED_BY_ANOTHER_SCALE = Defect(
    id="unscaled-by-another-scale",
    title="gradients are divided by twice the scale that the loss was multiplied by",
    source="https://github.com/deepspeedai/DeepSpeed/pull/8588",
    mechanism="the loss is multiplied by half of the scale",
    laws=("PAR-2", "AMP-3"),
    cells="id = dp2-fp16mp-default-meta",
    inject=partial(loss_scaled_by, 0.5),
    inject_twin=partial(loss_scaled_by, 1.0),
)


def load_scaler_state(trainer: Trainer, *, of_new_scaler: bool) -> None:
    """Load the state of a new scaler into the trainer's, or the scaler's own state once more."""
    own = trainer.scaler.state_dict()
    fresh = LossScaler(trainer.config, trainer.device).state_dict()
    trainer.scaler.load_state_dict(fresh if of_new_scaler else own)


RESUME_LOSS_SCALE_LOST = Defect(
    id="resume-loss-scale-lost",
    title="a resumed run begins with the initial loss scale",
    source="https://github.com/huggingface/accelerate/issues/4289",
    mechanism="the scaler's state is that of a new one after it was loaded",
    laws=("CKPT-1",),
    cells="id = dp2-fp16mp-overflows-default-meta-drop0.1-cosine-from.same-steps4",
    inject=partial(after_resume, partial(load_scaler_state, of_new_scaler=True)),
    inject_twin=partial(after_resume, partial(load_scaler_state, of_new_scaler=False)),
)


def optimizer_state(*, by_torch: bool) -> AbstractContextManager[None]:
    """Save an optimizer that has not stepped yet with the state that torch makes up, or its own state, taken twice."""

    def state_dicts(original: Callable[[Trainer], Any], trainer: Trainer) -> Any:
        if by_torch:
            return get_state_dict(trainer.model, trainer.optimizer)
        original(trainer)
        return original(trainer)

    return replaced_call("reference_trainer.checkpoint", "_state_dicts", state_dicts)


SAVING_COUNTS_A_STEP = Defect(
    id="saving-counts-a-step",
    title="saving before the first step that is not skipped increments the optimizer's step counter",
    source="https://github.com/pytorch/pytorch/issues/164929",
    mechanism="get_state_dict lets the optimizer step with gradients of zero, and its counter is saved",
    laws=("CKPT-1",),
    cells="id = dp2-fp16mp-overflows-default-meta-drop0.1-cosine-from.same-steps4",
    inject=partial(optimizer_state, by_torch=True),
    inject_twin=partial(optimizer_state, by_torch=False),
)
