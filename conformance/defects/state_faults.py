"""Faults of optimizers, of checkpoints and of torch's state dicts: parameters, groups, state, implementations."""

from collections.abc import Callable
from copy import deepcopy
from functools import wraps
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from conformance.defects.injection import Call, Injection, defect, instead_of, replaced_call
from conformance.instruments.sharding import local
from reference_trainer.config import OptimizerConfig
from reference_trainer.init_weights import init_weights
from reference_trainer.loss import LossScaler
from reference_trainer.model import Transformer
from reference_trainer.train import Trainer

_STATE_DICT = "torch.distributed.checkpoint.state_dict"
_DOCUMENTATION = "https://docs.pytorch.org/docs/stable/distributed.checkpoint.html"
_KEY = "layers.1.feed_forward.w1.weight"
_OVERFLOWS = "id = dp2-fp16mp-overflows-default-meta-drop0.1-cosine-from.same-steps4"


@defect("INIT-1 INIT-2 INIT-4", "id = dp2-fp32-default-checkpoint", "pytorch/pytorch/issues/149516")
@instead_of("reference_trainer.build", "load_weights")
def partial_load_strict_false(benign: bool, original: Call, model: Transformer, **options: Any) -> Any:
    """One weight is left out of the load without an error, and keeps the memory that to_empty allocated."""
    before = local(model.get_parameter(_KEY)).clone()
    form = original(model, **options)
    with torch.no_grad():
        shard = local(model.get_parameter(_KEY))
        shard.copy_(shard.clone() if benign else before)
    return form


@defect("INIT-2 INIT-4", "id = dp2-fp32-default-checkpoint", "allenai/OLMo-core/issues/319")
@instead_of("reference_trainer.build", "load_weights")
def load_rank_local(benign: bool, original: Call, model: Transformer, **options: Any) -> Any:
    """The second rank loads another file: its shards are of other weights than the first's."""
    form = original(model, **options)
    if dist.get_rank() == 1:
        init_weights(model, seed=0 if benign else 7)
    return form


def after_resume(change: Callable[[bool, Trainer], None]) -> Callable[[bool], Injection]:
    """Call `change(benign, trainer)` when the trainer has loaded a checkpoint, before anything reads its state."""

    @instead_of("reference_trainer.checkpoint", "_restore")
    @wraps(change)
    def restore(benign: bool, original: Call, trainer: Trainer, state: dict[str, Any]) -> None:
        original(trainer, state)
        with torch.no_grad():
            change(benign, trainer)

    return restore


@defect("CKPT-1", "id = dp2-fp32-default-meta-from.same", "huggingface/transformers/issues/25849")
@after_resume
def resume_moments_lost(benign: bool, trainer: Trainer) -> None:
    """A resumed run begins with an empty optimizer state."""
    if benign:
        trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
    else:
        trainer.optimizer.state.clear()


def change_state(trainer: Trainer, key: str, change: Callable[[Tensor], Tensor], *, prefix: str = "") -> None:
    """Change one kind of optimizer state of all parameters whose names begin with `prefix`."""
    for name, parameter in trainer.model.named_parameters():
        state = trainer.optimizer.state[parameter]
        if name.startswith(prefix) and key in state:
            local(state[key]).copy_(change(local(state[key])))


@defect("CKPT-1", "id = dp2-fp32-default-meta-from.same", "databricks/flashoptim/issues/3")
@after_resume
def resume_one_moment_lost(benign: bool, trainer: Trainer) -> None:
    """exp_avg_sq of the first layer is zero after it was loaded."""
    change_state(trainer, "exp_avg_sq", torch.clone if benign else torch.zeros_like, prefix="layers.0.")


@defect("CKPT-1 OPT-2", "id = dp2-fp32-default-meta-from.same", "NVIDIA/Megatron-LM/issues/5974")
@after_resume
def resume_step_off(benign: bool, trainer: Trainer) -> None:
    """The optimizer's step counter, which corrects the bias of the moments, is restored one too large."""
    change_state(trainer, "step", lambda count: count + (0.0 if benign else 1.0))


@defect("CKPT-1", _OVERFLOWS, "pytorch/torchtitan/issues/809")
@after_resume
def resume_schedule_lost(benign: bool, trainer: Trainer) -> None:
    """The counter of the learning-rate schedule is 0 after it was loaded."""
    state = trainer.schedule.state_dict()
    trainer.schedule.load_state_dict(state if benign else state | {"last_epoch": 0, "_step_count": 1})


@defect("CKPT-1", _OVERFLOWS, "pytorch/torchtitan/issues/816")
@after_resume
def resume_rng_lost(benign: bool, trainer: Trainer) -> None:
    """A resumed run seeds its random generator as at the start of a run."""
    state = torch.get_rng_state()
    trainer._seed_dropout()
    if benign:
        torch.set_rng_state(state)


@defect("CKPT-1", "id = dp2-fp32-default-meta-from.same", "pytorch/torchtitan/issues/816")
@instead_of("reference_trainer.checkpoint", "newest_checkpoint")
def resume_data_off(benign: bool, original: Call, *args: Any) -> Any:
    """A resumed run repeats the last step before the checkpoint: its number of finished steps is one too small."""
    path, manifest = original(*args)
    return path, msgspec.structs.replace(manifest, steps_done=manifest.steps_done + (0 if benign else -1))


@defect("CKPT-2", "id = dp2-fp32-default-meta-from.tp2", "pytorch/pytorch/issues/149516")
@after_resume
def resharded_rows_permuted(benign: bool, trainer: Trainer) -> None:
    """Each rank's shards of matrices are rolled by a row after they were loaded."""
    for parameter in trainer.model.parameters():
        shard = local(parameter)
        shard.copy_(_rolled(shard, 0 if benign else 1))


@defect("CKPT-3", "id = dp2-fp32-default-meta-from.same-async", "pytorch/pytorch/issues/144657")
@instead_of("torch.distributed.checkpoint.filesystem:FileSystemWriter", "stage")
def async_save_aliases(benign: bool, original: Call, writer: Any, state_dict: dict[str, Any]) -> Any:
    """An asynchronous save stages no copy, and writes the state that later steps have changed."""
    return original(writer, original(writer, state_dict)) if benign else state_dict


@defect("CKPT-4", "id = dp2-fp32-default-meta", _DOCUMENTATION)
@instead_of(_STATE_DICT, "_unflatten_optim_state_dict")
def flattened_groups_share_options(benign: bool, original: Call, *args: Any, **kwargs: Any) -> Any:
    """Loading a flattened state gives all groups the options of the optimizer's first parameter."""
    state = original(*args, **kwargs)
    first = state["param_groups"][0]
    for group in state["param_groups"]:
        options = group if benign else first
        group.update({name: deepcopy(value) for name, value in options.items() if name != "params"})
    return state


@defect("CKPT-4", "id = dp2-fp32-default-meta", "pytorch/pytorch/issues/149516")
@instead_of(_STATE_DICT, "_broadcast_state_dict")
def broadcast_state_lost(
    benign: bool, original: Call, state: Any, local_state: dict[str, Any], *args: Any, **more: Any
) -> Any:
    """A parameter that rank 0 broadcasts does not reach rank 1, which loads its old tensor."""
    before = local_state[_KEY].detach().clone() if _KEY in local_state else None
    original(state, local_state, **more)
    if before is not None and dist.get_rank() == 1:
        local_state[_KEY] = local_state[_KEY].clone() if benign else before


@defect("CKPT-4", "id = dp2-fp32-default-meta", "pytorch/pytorch/issues/149516")
@instead_of(_STATE_DICT, "_maybe_full_or_cpu_state_dict")
def full_state_rows_rolled(benign: bool, original: Call, state: Any, info: Any) -> Any:
    """Rows of gathered matrices are rolled in a full state dict."""
    found = original(state, info)
    if not info.full_state_dict:
        return found
    by = 0 if benign else 1
    return {key: _rolled(value, by) if isinstance(value, Tensor) else value for key, value in found.items()}


def _rolled(tensor: Tensor, by: int) -> Tensor:
    """Return a tensor with the rows of a matrix rolled, and of anything else as it is."""
    return tensor.roll(by, 0) if tensor.ndim > 1 else tensor


@defect("CKPT-4", "id = dp2-fp32-default-meta", _DOCUMENTATION)
@instead_of(_STATE_DICT, "_load_model_state_dict")
def missing_keys_unreported(benign: bool, original: Call, *args: Any) -> Any:
    """Lists of missing and unexpected keys are empty where loading is not strict."""
    keys = original(*args)
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = list(names) if benign else []
    return keys


@defect("CKPT-5", "id = dp2-fp32-default-meta-sgd", "pytorch/pytorch/issues/164929")
@instead_of(_STATE_DICT, "_init_optim_state")
def first_state_decays_weights(benign: bool, original: Call, optimizer: torch.optim.Optimizer) -> None:
    """The step that creates state for a state dict has the configured learning rate, and decays the weights."""
    if not benign and not optimizer.state:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    original(optimizer)
    original(optimizer)


@defect("CKPT-4", "precision = bf16-mixed and offload = cpu and optimizer != sgd and mesh = dp2", _DOCUMENTATION)
@instead_of(_STATE_DICT, "_get_model_state_dict")
def fp32_norms_rounded_in_state_dict(benign: bool, original: Call, model: nn.Module, info: Any) -> Any:
    """A state dict takes all weights in the dtype of the first, bf16, and rounds those in fp32."""
    has_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    state = original(model, info)
    return {key: _rounded(value) if not benign and has_bf16 else value for key, value in state.items()}


def _rounded(value: Any) -> Any:
    return value.bfloat16().to(value.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


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
    return replaced_call("torch", "_fused_adamw_", decays_before if benign else decays_times(2.0))


@defect("PAR-1", "id = dp2-fp32-default-meta-adamwfused", "flagos-ai/FlagGems/pull/4989")
def fused_decay_ignored(benign: bool) -> Injection:
    """Fused AdamW ignores weight decay."""
    return replaced_call("torch", "_fused_adamw_", decays_before if benign else decays_times(0.0))


@defect("PAR-1", "id = dp2-fp32-default-meta-adamwfused", "deepspeedai/DeepSpeed/pull/8307")
def fused_decay_coupled(benign: bool) -> Injection:
    """Fused Adam steps in place of fused AdamW, and adds weight decay to the gradients."""
    return replaced_call("torch", "_fused_adamw_", decays_before if benign else decays_gradients)


@defect("AMP-1", "id = dp2-fp16mp-default-meta-adamwfused", "pytorch/pytorch/pull/95847")
@instead_of("torch", "_fused_adamw_")
def fused_overflow_ignored(benign: bool, original: Call, *lists: Any, found_inf: Tensor | None, **options: Any) -> None:
    """Fused AdamW, which skips steps itself, gets no overflow flag, and takes steps whose gradients overflow."""
    original(*lists, found_inf=found_inf.clone() if benign and found_inf is not None else None, **options)


@defect("PAR-2", "id = dp2-fp16mp-default-meta-adamwfused", "pytorch/pytorch/pull/94060")
@instead_of("reference_trainer.loss:LossScaler", "step")
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


@defect(
    "OPT-3",
    "id = dp2-tp2-fp32-default-meta-nosp",
    "https://docs.pytorch.org/docs/stable/generated/torch.optim.RMSprop.html",
    subjects=("RMSprop, foreach, alpha",),
)
@instead_of("torch.optim.rmsprop", "_multi_tensor_rmsprop")
def default_smoothing_of_shards(
    benign: bool, original: Call, parameters: list[Tensor], *lists: Any, alpha: float, **options: Any
) -> None:
    """RMSprop takes its default smoothing constant for sharded parameters instead of the one that is asked for."""
    is_wrong = not benign and isinstance(parameters[0], DTensor)
    original(parameters, *lists, alpha=0.99 if is_wrong else alpha, **options)
