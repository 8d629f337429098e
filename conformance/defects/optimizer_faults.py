"""Faults of the optimizer: which parameters it holds, which of them decay, its state and its implementations."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conformance.defects.checkpoint_faults import optimizer_state
from conformance.defects.injection import Defect, replaced_call
from reference_trainer.config import OptimizerConfig
from reference_trainer.loss_scale import LossScaler
from reference_trainer.model import Transformer


def block_before_optimizer(*, unshard: bool) -> AbstractContextManager[None]:
    """Unshard a block before the optimizer is built, or reshard it although it is sharded."""

    def build_optimizer(
        original: Callable[..., torch.optim.Optimizer], model: Transformer, config: OptimizerConfig
    ) -> torch.optim.Optimizer:
        block: Any = model.blocks[0]  # fully_shard has added the methods of FSDPModule
        if unshard:
            block.unshard()
        else:
            block.reshard()
        return original(model, config)

    return replaced_call("reference_trainer.train", "build_optimizer", build_optimizer)


OPTIMIZER_STALE_PARAMETERS = Defect(
    id="optimizer-stale-params",
    title="the optimizer holds tensors that are not trained",
    source="https://github.com/pytorch/pytorch/issues/149205",
    mechanism="the optimizer is built while a group is unsharded, and gets its plain parameters",
    laws=("OPT-1", "PAR-1"),
    cells="id = dp1-fp32-default-meta",
    inject=partial(block_before_optimizer, unshard=True),
    inject_twin=partial(block_before_optimizer, unshard=False),
)


Groups = list[dict[str, Any]]
"""Parameter groups of an optimizer."""


def optimizer_groups(regroup: Callable[[Groups], Groups]) -> AbstractContextManager[None]:
    """Give the optimizer the parameter groups `regroup(groups)`."""

    def parameter_groups(original: Callable[..., Groups], model: nn.Module, *, weight_decay: float) -> Groups:
        return regroup(original(model, weight_decay=weight_decay))

    return replaced_call("reference_trainer.optim", "parameter_groups", parameter_groups)


def without_last_parameter(groups: Groups) -> Groups:
    """Return the groups without the last parameter."""
    *others, last = groups
    return [*others, {**last, "params": last["params"][:-1]}]


def group_per_parameter(groups: Groups) -> Groups:
    """Return a group for each parameter, with the options of the group that it was in."""
    return [{**group, "params": [p]} for group in groups for p in group["params"]]


OPTIMIZER_DROPS_PARAMETERS = Defect(
    id="opt-drop-params",
    title="a parameter is missing in the optimizer",
    source="https://github.com/huggingface/accelerate/issues/3394",
    mechanism="the last parameter is in none of the groups",
    laws=("OPT-1", "PAR-1"),
    cells="id = dp1-fp32-default-meta",
    inject=partial(optimizer_groups, without_last_parameter),
    inject_twin=partial(optimizer_groups, group_per_parameter),
)


def single_group(groups: Groups) -> Groups:
    """Return one group of all parameters, with the options of the first: every parameter decays."""
    return [{**groups[0], "params": [p for group in groups for p in group["params"]]}]


WEIGHT_DECAY_GROUPS_LOST = Defect(
    id="weight-decay-groups-lost",
    title="norms and biases decay",
    source="https://github.com/volcengine/verl/issues/5070",
    mechanism="all parameters are in one group",
    laws=("OPT-1", "PAR-1"),
    cells="id = dp1-fp32-default-meta",
    inject=partial(optimizer_groups, single_group),
    inject_twin=partial(optimizer_groups, group_per_parameter),
)


def buffers_before_step(change: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """Replace each momentum buffer by `change(buffer)` before each step."""

    def change_buffers(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            state["momentum_buffer"] = change(state["momentum_buffer"])

    def build_optimizer(
        original: Callable[..., torch.optim.Optimizer], model: nn.Module, config: OptimizerConfig
    ) -> torch.optim.Optimizer:
        optimizer = original(model, config)
        optimizer.register_step_pre_hook(change_buffers)
        return optimizer

    return replaced_call("reference_trainer.train", "build_optimizer", build_optimizer)


MOMENTUM_REINITIALISED = Defect(
    id="momentum-reinitialised",
    title="each step begins with a new momentum buffer",
    source="https://github.com/kozistr/pytorch_optimizer/pull/516",
    mechanism="buffers are set to zero before each step: momentum has no effect",
    laws=("PAR-1",),
    cells="id = dp2-fp32-default-meta-sgdmomentum",
    inject=partial(buffers_before_step, torch.zeros_like),
    inject_twin=partial(buffers_before_step, torch.clone),
)
RESUME_MOMENTUM_LOST = Defect(
    id="resume-momentum-lost",
    title="a resumed run begins with a new momentum buffer",
    source="https://github.com/KempnerInstitute/KempnerForge/pull/115",
    mechanism="buffers are zero after they were loaded",
    laws=("CKPT-1",),
    cells="id = dp2-fp32-default-meta-sgdmomentum-from.same",
    inject=partial(optimizer_state, torch.zeros_like, key="momentum_buffer"),
    inject_twin=partial(optimizer_state, torch.clone, key="momentum_buffer"),
)


def fused_adamw(call: Callable[..., None]) -> AbstractContextManager[None]:
    """Replace the fused kernel of AdamW by `call(kernel, *arguments)`."""
    return replaced_call("torch", "_fused_adamw_", call)


def decays_twice(original: Callable[..., None], *lists: Any, weight_decay: float, **options: Any) -> None:
    """Step with twice the decay."""
    original(*lists, weight_decay=2.0 * weight_decay, **options)


def decays_never(original: Callable[..., None], *lists: Any, weight_decay: float, **options: Any) -> None:
    """Step without decay."""
    original(*lists, weight_decay=0.0, **options)


def decays_gradients(original: Callable[..., None], *lists: Any, **options: Any) -> None:
    """Step with the kernel of Adam, which adds the decay to the gradients."""
    torch._fused_adam_(*lists, **options)


def decays_before(
    original: Callable[..., None], parameters: list[Tensor], *lists: Any, lr: float, weight_decay: float, **options: Any
) -> None:
    """Let the parameters decay, then step without decay; it is the same."""
    torch._foreach_mul_(parameters, 1.0 - lr * weight_decay)
    original(parameters, *lists, lr=lr, weight_decay=0.0, **options)


FUSED_DECAY_TWICE = Defect(
    id="fused-decay-twice",
    title="the fused kernel applies weight decay twice",
    source="https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html",
    mechanism="fused AdamW is given twice the decay",
    laws=("PAR-1",),
    cells="id = dp2-fp32-default-meta-adamwfused",
    inject=partial(fused_adamw, decays_twice),
    inject_twin=partial(fused_adamw, decays_before),
)
FUSED_DECAY_IGNORED = Defect(
    id="fused-decay-ignored",
    title="the fused kernel ignores weight decay",
    source="https://github.com/flagos-ai/FlagGems/pull/4989",
    mechanism="fused AdamW is given no decay",
    laws=("PAR-1",),
    cells="id = dp2-fp32-default-meta-adamwfused",
    inject=partial(fused_adamw, decays_never),
    inject_twin=partial(fused_adamw, decays_before),
)
FUSED_DECAY_COUPLED = Defect(
    id="fused-decay-coupled",
    title="the fused kernel adds weight decay to the gradients",
    source="https://github.com/deepspeedai/DeepSpeed/pull/8307",
    mechanism="the kernel of Adam steps in place of that of AdamW",
    laws=("PAR-1",),
    cells="id = dp2-fp32-default-meta-adamwfused",
    inject=partial(fused_adamw, decays_gradients),
    inject_twin=partial(fused_adamw, decays_before),
)


def without_overflow(original: Callable[..., None], *lists: Any, found_inf: Tensor | None, **options: Any) -> None:
    """Step without being told of overflow."""
    original(*lists, found_inf=None, **options)


def with_overflow_copied(original: Callable[..., None], *lists: Any, found_inf: Tensor | None, **options: Any) -> None:
    """Step with a copy of the overflow."""
    original(*lists, found_inf=None if found_inf is None else found_inf.clone(), **options)


FUSED_OVERFLOW_IGNORED = Defect(
    id="fused-overflow-ignored",
    title="fused AdamW takes steps whose gradients overflow",
    source="https://github.com/pytorch/pytorch/pull/95847",
    mechanism="the kernel, which skips such steps itself, is not told of the overflow",
    laws=("AMP-1",),
    cells="id = dp2-fp16mp-default-meta-adamwfused",
    inject=partial(fused_adamw, without_overflow),
    inject_twin=partial(fused_adamw, with_overflow_copied),
)


def unscaling_in_step(*, by_scale: bool) -> AbstractContextManager[None]:
    """Let the optimizer divide gradients, which are unscaled, by the loss scale once more, or by 1."""

    def step(original: Callable[..., Any], scaler: LossScaler, optimizer: Any) -> Any:
        scale = torch.tensor(scaler.get_scale())
        optimizer.grad_scale = scale if by_scale else torch.ones_like(scale)
        return original(scaler, optimizer)

    return replaced_call("reference_trainer.loss_scale:LossScaler", "step", step)


FUSED_UNSCALES_AGAIN = Defect(
    id="fused-unscales-again",
    title="fused AdamW unscales gradients that are unscaled",
    source="https://github.com/pytorch/pytorch/pull/94060",
    mechanism="the kernel, which can unscale gradients itself, is given the loss scale after unscale_ was called",
    laws=("PAR-2",),
    cells="id = dp2-fp16mp-default-meta-adamwfused",
    inject=partial(unscaling_in_step, by_scale=True),
    inject_twin=partial(unscaling_in_step, by_scale=False),
)


def foreach_step(call: Callable[..., None]) -> AbstractContextManager[None]:
    """Replace the operator with which foreach AdamW changes all parameters by `call(operator, *lists)`."""
    return replaced_call("torch", "_foreach_addcdiv_", call)


def without_last_tensor(original: Callable[..., None], *lists: list[Any]) -> None:
    """Change all tensors but the last."""
    original(*(values[:-1] for values in lists))


def one_by_one(original: Callable[..., None], *lists: list[Any]) -> None:
    """Change each tensor in a list of its own."""
    for values in zip(*lists, strict=True):
        original(*([value] for value in values))


FOREACH_SKIPS_TENSOR = Defect(
    id="foreach-skips-tensor",
    title="foreach AdamW leaves one tensor of the list as it is",
    source="https://github.com/pytorch/pytorch/issues/100701",
    mechanism="the last update of the list gets lost",
    laws=("PAR-1",),
    cells="id = dp2-fp32-default-meta-adamwforeach",
    inject=partial(foreach_step, without_last_tensor),
    inject_twin=partial(foreach_step, one_by_one),
)


def adam_in(dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Let AdamW step with copies of all tensors in another dtype, or (None) in their own."""

    def step(original: Callable[..., None], *tensors_by_kind: list[Tensor], **options: Any) -> None:
        *kinds, counters = tensors_by_kind
        copies = [[tensor.to(dtype or tensor.dtype, copy=True) for tensor in tensors] for tensors in kinds]
        original(*copies, counters, **options)
        for tensors, of_kind in zip(kinds, copies, strict=True):
            for tensor, copy in zip(tensors, of_kind, strict=True):
                tensor.copy_(copy)

    return replaced_call("torch.optim.adam", "_single_tensor_adam", step)


BF16_MASTERS_STEP_IN_FP32 = Defect(
    id="bf16-masters-step-in-fp32",
    title="AdamW steps in fp32 with parameters that are bf16, and rounds once",
    source="https://github.com/pytorch/pytorch/pull/178034",
    mechanism="parameters, gradients and moments are cast to fp32 for the step, and back",
    laws=("OPT-2",),
    cells="id = dp2-bf16mixed-default-meta",
    inject=partial(adam_in, torch.float32),
    inject_twin=partial(adam_in, None),
)
