"""Faults of checkpoints: what is loaded, and what a resumed run does not get back."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from conformance.defects.injection import Defect, replaced_call
from conformance.instruments.sharding import local
from reference_trainer.init_weights import init_weights
from reference_trainer.model import Transformer
from reference_trainer.train import Trainer

_SKIPPED = "layers.1.feed_forward.w1.weight"


def skipped_key(*, skip: bool) -> AbstractContextManager[None]:
    """Restore one parameter from before the load, or write its loaded values once more."""

    def load_weights(original: Callable[..., Any], model: Transformer, **options: Any) -> Any:
        before = local(model.get_parameter(_SKIPPED)).clone()
        form = original(model, **options)
        with torch.no_grad():
            shard = local(model.get_parameter(_SKIPPED))
            shard.copy_(before if skip else shard.clone())
        return form

    return replaced_call("reference_trainer.build", "load_weights", load_weights)


PARTIAL_LOAD_STRICT_FALSE = Defect(
    id="partial-load-strict-false",
    title="a parameter that a checkpoint lacks keeps the memory that to_empty allocated",
    source="https://github.com/pytorch/pytorch/issues/149516",
    mechanism="one weight is left out of the load, without an error",
    laws=("INIT-1", "INIT-2", "INIT-4"),
    cells="id = dp2-fp32-default-checkpoint",
    inject=partial(skipped_key, skip=True),
    inject_twin=partial(skipped_key, skip=False),
)


def second_rank_loads(*, seed: int) -> AbstractContextManager[None]:
    """Overwrite the second rank's loaded weights by the initial weights of a seed; checkpoints hold those of seed 0."""

    def load_weights(original: Callable[..., Any], model: Transformer, **options: Any) -> Any:
        form = original(model, **options)
        if dist.get_rank() == 1:
            init_weights(model, seed=seed)
        return form

    return replaced_call("reference_trainer.build", "load_weights", load_weights)


LOAD_RANK_LOCAL = Defect(
    id="load-rank-local",
    title="a rank loads a file of its own",
    source="https://github.com/allenai/OLMo-core/issues/319",
    mechanism="the second rank's shards are of other weights than the first's",
    laws=("INIT-2", "INIT-4"),
    cells="id = dp2-fp32-default-checkpoint",
    inject=partial(second_rank_loads, seed=7),
    inject_twin=partial(second_rank_loads, seed=0),
)


def after_resume(change: Callable[[Trainer], None]) -> AbstractContextManager[None]:
    """Call `change(trainer)` when the trainer has loaded a checkpoint, before anything else reads its state."""

    def restore(original: Callable[..., None], trainer: Trainer, state: dict[str, Any]) -> None:
        original(trainer, state)
        with torch.no_grad():
            change(trainer)

    return replaced_call("reference_trainer.checkpoint", "_restore", restore)


def clear_moments(trainer: Trainer) -> None:
    """Clear the optimizer's state."""
    trainer.optimizer.state.clear()


def load_moments_again(trainer: Trainer) -> None:
    """Load the optimizer's own state dict."""
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())


RESUME_MOMENTS_LOST = Defect(
    id="resume-moments-lost",
    title="a resumed run begins with a new optimizer state",
    source="https://github.com/huggingface/transformers/issues/25849",
    mechanism="the optimizer's state is empty after it was loaded",
    laws=("CKPT-1",),
    cells="id = dp2-fp32-default-meta-from.same",
    inject=partial(after_resume, clear_moments),
    inject_twin=partial(after_resume, load_moments_again),
)


def optimizer_state(change: Callable[[Tensor], Tensor], *, key: str, prefix: str = "") -> AbstractContextManager[None]:
    """Change one kind of optimizer state of all parameters whose names begin with `prefix`, when a run resumes."""

    def change_trainer(trainer: Trainer) -> None:
        for name, parameter in trainer.model.named_parameters():
            state = trainer.optimizer.state[parameter]
            if name.startswith(prefix) and key in state:
                local(state[key]).copy_(change(local(state[key])))

    return after_resume(change_trainer)


RESUME_ONE_MOMENT_LOST = Defect(
    id="resume-one-moment-lost",
    title="one kind of moment of one layer is not restored",
    source="https://github.com/databricks/flashoptim/issues/3",
    mechanism="exp_avg_sq of the first layer is zero after it was loaded",
    laws=("CKPT-1",),
    cells="id = dp2-fp32-default-meta-from.same",
    inject=partial(optimizer_state, torch.zeros_like, key="exp_avg_sq", prefix="layers.0."),
    inject_twin=partial(optimizer_state, torch.clone, key="exp_avg_sq", prefix="layers.0."),
)
RESUME_STEP_OFF = Defect(
    id="resume-step-off",
    title="the optimizer's step counter is restored off by one",
    source="https://github.com/NVIDIA/Megatron-LM/issues/5974",
    mechanism="one is added to the counter that corrects the moments' bias",
    laws=("CKPT-1", "OPT-2"),
    cells="id = dp2-fp32-default-meta-from.same",
    inject=partial(optimizer_state, lambda count: count + 1.0, key="step"),
    inject_twin=partial(optimizer_state, lambda count: count + 0.0, key="step"),
)


def restart_schedule(trainer: Trainer, *, at: int | None) -> None:
    """Load the learning-rate schedule's own state with its counter set to `at`, or (None) unchanged."""
    schedule = trainer.schedule
    schedule.load_state_dict(schedule.state_dict() | ({} if at is None else {"last_epoch": at, "_step_count": at + 1}))


RESUME_SCHEDULE_LOST = Defect(
    id="resume-schedule-lost",
    title="the learning rate begins anew",
    source="https://github.com/pytorch/torchtitan/issues/809",
    mechanism="the schedule's counter is set to 0 after it was loaded",
    laws=("CKPT-1",),
    cells="id = dp2-fp16mp-overflows-default-meta-drop0.1-cosine-from.same-steps4",
    inject=partial(after_resume, partial(restart_schedule, at=0)),
    inject_twin=partial(after_resume, partial(restart_schedule, at=None)),
)


def seed_again(trainer: Trainer, *, forget: bool) -> None:
    """Seed the generator of dropout, and restore its state afterwards unless that is to be forgotten."""
    state = torch.get_rng_state()
    trainer._seed_dropout()
    if not forget:
        torch.set_rng_state(state)


RESUME_RNG_LOST = Defect(
    id="resume-rng-lost",
    title="random numbers begin anew",
    source="https://github.com/pytorch/torchtitan/issues/816",
    mechanism="the generator is seeded as at the start of a run",
    laws=("CKPT-1",),
    cells="id = dp2-fp16mp-overflows-default-meta-drop0.1-cosine-from.same-steps4",
    inject=partial(after_resume, partial(seed_again, forget=True)),
    inject_twin=partial(after_resume, partial(seed_again, forget=False)),
)


def steps_done(change: int) -> AbstractContextManager[None]:
    """Add `change` to the number of steps that a checkpoint says were done."""

    def newest_checkpoint(original: Callable[..., Any], *args: Any) -> Any:
        path, manifest = original(*args)
        return path, msgspec.structs.replace(manifest, steps_done=manifest.steps_done + change)

    return replaced_call("reference_trainer.checkpoint", "newest_checkpoint", newest_checkpoint)


RESUME_DATA_OFF = Defect(
    id="resume-data-off",
    title="the last step before the checkpoint is done again",
    source="https://github.com/pytorch/torchtitan/issues/816",
    mechanism="the number of steps that are done is one too small",
    laws=("CKPT-1",),
    cells="id = dp2-fp32-default-meta-from.same",
    inject=partial(steps_done, -1),
    inject_twin=partial(steps_done, 0),
)


def roll_rows(trainer: Trainer, *, by: int) -> None:
    """Roll the rows of this rank's shard of each matrix."""
    for parameter in trainer.model.parameters():
        shard = local(parameter)
        if shard.ndim > 1:
            shard.copy_(shard.roll(by, 0))


RESHARDED_ROWS_PERMUTED = Defect(
    id="resharded-rows-permuted",
    title="rows of a shard come back in another order",
    source="https://github.com/pytorch/pytorch/issues/149516",
    mechanism="each rank's shards of matrices are rolled by a row after they were loaded",
    laws=("CKPT-2",),
    cells="id = dp2-fp32-default-meta-from.tp2",
    inject=partial(after_resume, partial(roll_rows, by=1)),
    inject_twin=partial(after_resume, partial(roll_rows, by=0)),
)


def staged(*, copied: bool) -> AbstractContextManager[None]:
    """Let an asynchronous save write a copy of the copied state, or the run's own tensors."""

    def stage(original: Callable[..., Any], writer: Any, state_dict: dict[str, Any]) -> Any:
        return original(writer, original(writer, state_dict)) if copied else state_dict

    return replaced_call("torch.distributed.checkpoint.filesystem:FileSystemWriter", "stage", stage)


ASYNC_SAVE_ALIASES = Defect(
    id="async-save-aliases",
    title="an asynchronous save writes the state that later steps have changed",
    source="https://github.com/pytorch/pytorch/issues/144657",
    mechanism="the state is staged without a copy",
    laws=("CKPT-3",),
    cells="id = dp2-fp32-default-meta-from.same-async",
    inject=partial(staged, copied=False),
    inject_twin=partial(staged, copied=True),
)
