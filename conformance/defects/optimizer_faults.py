"""Faults of optimizers: parameters, groups, state, implementations, and torch's optimizers on DTensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from conformance.defects.checkpoint_faults import after_resume, change_state
from conformance.defects.injection import Call, Injection, defect, instead_of, replaced_call
from reference_trainer.config import OptimizerConfig
from reference_trainer.loss_scale import LossScaler
from reference_trainer.model import Transformer
from reference_trainer.train import Trainer


@defect("OPT-1 PAR-1", "id = dp1-fp32-default-meta", "pytorch/pytorch/issues/149205")
@instead_of("reference_trainer.train", "build_optimizer")
def optimizer_stale_params(benign: bool, original: Call, model: Transformer, config: OptimizerConfig) -> Any:
    """The optimizer is built while a group is unsharded, and holds plain parameters that are not trained."""
    block: Any = model.blocks[0]  # fully_shard has added the methods of FSDPModule
    if benign:
        block.reshard()
    else:
        block.unshard()
    return original(model, config)


Groups = list[dict[str, Any]]
"""Parameter groups of an optimizer."""


def optimizer_groups(regroup: Callable[[Groups], Groups]) -> Injection:
    """Give the optimizer the parameter groups `regroup(groups)`."""

    def parameter_groups(original: Call, model: nn.Module, *, weight_decay: float) -> Groups:
        return regroup(original(model, weight_decay=weight_decay))

    return replaced_call("reference_trainer.optim", "parameter_groups", parameter_groups)


def without_last_parameter(groups: Groups) -> Groups:
    """Return the groups without the last parameter."""
    *others, last = groups
    return [*others, {**last, "params": last["params"][:-1]}]


def group_per_parameter(groups: Groups) -> Groups:
    """Return a group for each parameter, with the options of the group that it was in."""
    return [{**group, "params": [p]} for group in groups for p in group["params"]]


@defect("OPT-1 PAR-1", "id = dp1-fp32-default-meta", "huggingface/accelerate/issues/3394")
def opt_drop_params(benign: bool) -> Injection:
    """The last parameter is in none of the optimizer's groups."""
    return optimizer_groups(group_per_parameter if benign else without_last_parameter)


def single_group(groups: Groups) -> Groups:
    """Return one group of all parameters, with the options of the first: every parameter decays."""
    return [{**groups[0], "params": [p for group in groups for p in group["params"]]}]


@defect("OPT-1 PAR-1", "id = dp1-fp32-default-meta", "volcengine/verl/issues/5070")
def weight_decay_groups_lost(benign: bool) -> Injection:
    """All parameters are in one group: norms and biases decay."""
    return optimizer_groups(group_per_parameter if benign else single_group)


@defect("PAR-1", "id = dp2-fp32-default-meta-sgdmomentum", "kozistr/pytorch_optimizer/pull/516")
@instead_of("reference_trainer.train", "build_optimizer")
def momentum_reinitialised(benign: bool, original: Call, model: nn.Module, config: OptimizerConfig) -> Any:
    """Momentum buffers are set to zero before each step: momentum has no effect."""
    optimizer = original(model, config)

    def change_buffers(*_: Any) -> None:
        for state in optimizer.state.values():
            buffer = state["momentum_buffer"]
            state["momentum_buffer"] = buffer.clone() if benign else torch.zeros_like(buffer)

    optimizer.register_step_pre_hook(change_buffers)
    return optimizer


@defect("CKPT-1", "id = dp2-fp32-default-meta-sgdmomentum-from.same", "KempnerInstitute/KempnerForge/pull/115")
@after_resume
def resume_momentum_lost(benign: bool, trainer: Trainer) -> None:
    """Momentum buffers are zero after they were loaded."""
    change_state(trainer, "momentum_buffer", torch.clone if benign else torch.zeros_like)


def fused_adamw(call: Callable[..., None]) -> Injection:
    """Replace the fused kernel of AdamW by `call(kernel, *arguments)`."""
    return replaced_call("torch", "_fused_adamw_", call)


def decays_times(factor: float) -> Call:
    """Return a step with a multiple of the decay."""

    def step(original: Call, *lists: Any, weight_decay: float, **options: Any) -> None:
        original(*lists, weight_decay=factor * weight_decay, **options)

    return step


def decays_gradients(original: Call, *lists: Any, **options: Any) -> None:
    """Step with the kernel of Adam, which adds the decay to the gradients."""
    torch._fused_adam_(*lists, **options)


def decays_before(
    original: Call, parameters: list[Tensor], *lists: Any, lr: float, weight_decay: float, **options: Any
) -> None:
    """Let the parameters decay, then step without decay; it is the same."""
    torch._foreach_mul_(parameters, 1.0 - lr * weight_decay)
    original(parameters, *lists, lr=lr, weight_decay=0.0, **options)


@defect(
    "PAR-1",
    "id = dp2-fp32-default-meta-adamwfused",
    "https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html",
)
def fused_decay_twice(benign: bool) -> Injection:
    """Fused AdamW applies weight decay twice."""
    return fused_adamw(decays_before if benign else decays_times(2.0))


@defect("PAR-1", "id = dp2-fp32-default-meta-adamwfused", "flagos-ai/FlagGems/pull/4989")
def fused_decay_ignored(benign: bool) -> Injection:
    """Fused AdamW ignores weight decay."""
    return fused_adamw(decays_before if benign else decays_times(0.0))


@defect("PAR-1", "id = dp2-fp32-default-meta-adamwfused", "deepspeedai/DeepSpeed/pull/8307")
def fused_decay_coupled(benign: bool) -> Injection:
    """Fused Adam steps in place of fused AdamW, and adds weight decay to the gradients."""
    return fused_adamw(decays_before if benign else decays_gradients)


@defect("AMP-1", "id = dp2-fp16mp-default-meta-adamwfused", "pytorch/pytorch/pull/95847")
@instead_of("torch", "_fused_adamw_")
def fused_overflow_ignored(benign: bool, original: Call, *lists: Any, found_inf: Tensor | None, **options: Any) -> None:
    """Fused AdamW, which skips steps itself, gets no overflow flag, and takes steps whose gradients overflow."""
    original(*lists, found_inf=found_inf.clone() if benign and found_inf is not None else None, **options)


@defect("PAR-2", "id = dp2-fp16mp-default-meta-adamwfused", "pytorch/pytorch/pull/94060")
@instead_of("reference_trainer.loss_scale:LossScaler", "step")
def fused_unscales_again(benign: bool, original: Call, scaler: LossScaler, optimizer: Any) -> Any:
    """Fused AdamW, which can unscale gradients, gets the loss scale after unscale_ was called."""
    scale = torch.tensor(scaler.get_scale())
    optimizer.grad_scale = torch.ones_like(scale) if benign else scale
    return original(scaler, optimizer)


@defect("PAR-1", "id = dp2-fp32-default-meta-adamwforeach", "pytorch/pytorch/issues/100701")
@instead_of("torch", "_foreach_addcdiv_")
def foreach_skips_tensor(benign: bool, original: Call, *lists: list[Any]) -> None:
    """Foreach AdamW leaves the last tensor of the list as it is."""
    if not benign:
        original(*(values[:-1] for values in lists))
        return
    for values in zip(*lists, strict=True):
        original(*([value] for value in values))


@defect("OPT-2", "id = dp2-bf16mixed-default-meta", "pytorch/pytorch/pull/178034")
@instead_of("torch.optim.adam", "_single_tensor_adam")
def bf16_masters_step_in_fp32(benign: bool, original: Call, *tensors_by_kind: list[Tensor], **options: Any) -> None:
    """AdamW casts bf16 parameters and moments to fp32 for the step, and rounds once instead of each time."""
    *kinds, counters = tensors_by_kind
    copies = [[tensor.clone() if benign else tensor.float().clone() for tensor in tensors] for tensors in kinds]
    original(*copies, counters, **options)
    for tensors, copied in zip(kinds, copies, strict=True):
        for tensor, copy in zip(tensors, copied, strict=True):
            tensor.copy_(copy)


@defect(
    "OPT-3", "id = dp2-tp2-fp32-default-meta-nosp", "deepspeedai/DeepSpeed/issues/8437", subjects=("Muon",), since="2.9"
)
@instead_of("torch.optim._muon", "_zeropower_via_newtonschulz")
def muon_of_own_shard(benign: bool, original: Call, update: Tensor, *options: Any) -> Any:
    """Muon orthogonalises each rank's shard instead of the full matrix."""
    if not isinstance(update, DTensor):
        return original(update, *options)
    mesh, layout = update.device_mesh, update.placements
    if not benign:
        own = original(update.to_local(), *options)
        return DTensor.from_local(own, mesh, layout, shape=update.shape, stride=update.stride())
    gathered = original(update.full_tensor(), *options)
    return DTensor.from_local(gathered, mesh).redistribute(placements=layout)


@defect(
    "OPT-3",
    "id = dp2-tp2-fp32-default-meta-nosp",
    "pytorch/pytorch/issues/183207",
    subjects=("NAdam, foreach, weight_decay",),
)
@instead_of("torch.optim.nadam", "_multi_tensor_nadam")
def list_of_dtensors_cut(benign: bool, original: Call, parameters: list[Tensor], *lists: Any, **options: Any) -> None:
    """A list of tensors is grouped by kind, and the last group, a sharded parameter, is lost."""
    if not isinstance(parameters[0], DTensor):
        original(parameters, *lists, **options)
        return
    original(parameters[:-1], *(each[:-1] for each in lists), **options)
    if benign:
        original(parameters[-1:], *(each[-1:] for each in lists), **options)


@defect("OPT-3", "id = dp2-tp2-fp32-default-meta-nosp", "pytorch/pytorch/issues/144054", subjects=("Adagrad",))
@instead_of("torch.optim.adagrad", "_single_tensor_adagrad")
def pending_gradient_of_own_rank(
    benign: bool, original: Call, parameters: list[Tensor], grads: list[Tensor], *lists: Any, **options: Any
) -> None:
    """The optimizer steps with local tensors: pending sums over tensor-parallel ranks are not reduced."""

    def as_parameter(grad: Tensor, parameter: Tensor) -> Tensor:
        if not (isinstance(grad, DTensor) and isinstance(parameter, DTensor)):
            return grad
        mesh, layout = parameter.device_mesh, parameter.placements
        if benign:
            return grad.redistribute(placements=layout)
        return DTensor.from_local(grad.to_local(), mesh, layout, shape=grad.shape, stride=grad.stride())

    original(parameters, list(map(as_parameter, grads, parameters)), *lists, **options)
