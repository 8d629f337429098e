"""Faults of checkpoints and of torch's state dicts: wrong loaded values, and state that a resumed run lacks."""

from collections.abc import Callable
from copy import deepcopy
from functools import wraps
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance.defects.injection import Call, Injection, defect, instead_of
from conformance.instruments.sharding import local
from reference_trainer.init_weights import init_weights
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
