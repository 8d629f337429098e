"""Faults of checkpoints: what is loaded, and what a resumed run does not get back."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from conformance.defects.injection import Defect, replaced
from conformance.instruments.sharding import local
from reference_trainer.init_weights import init_weights
from reference_trainer.model import Transformer
from reference_trainer.train import Trainer

_SKIPPED = "layers.1.feed_forward.w1.weight"


def after_load(change: Callable[[Transformer], None]) -> AbstractContextManager[None]:
    """Change the model when weights have been loaded into it."""

    def make(original: Any) -> Any:
        def load_weights(model: Transformer, **options: Any) -> Any:
            form = original(model, **options)
            with torch.no_grad():
                change(model)
            return form

        return load_weights

    return replaced("reference_trainer.build", "load_weights", make)


def skipped_key(*, skip: bool) -> AbstractContextManager[None]:
    """Leave one parameter as it was before loading, or what was loaded, written again."""

    def make(original: Any) -> Any:
        def load_weights(model: Transformer, **options: Any) -> Any:
            before = local(model.get_parameter(_SKIPPED)).clone()
            form = original(model, **options)
            with torch.no_grad():
                part = local(model.get_parameter(_SKIPPED))
                part.copy_(before if skip else part.clone())
            return form

        return load_weights

    return replaced("reference_trainer.build", "load_weights", make)


def own_file(model: Transformer, *, differs: bool) -> None:
    """As if the second rank had a file of its own, with other weights."""
    if dist.get_rank() == 1:
        init_weights(model, seed=7 if differs else 0)


def after_resume(change: Callable[[Trainer], None]) -> AbstractContextManager[None]:
    """Change the trainer when it has been given the state of a checkpoint, before anybody looks at it."""

    def make(original: Any) -> Any:
        def restore(trainer: Trainer, state: dict[str, Any]) -> None:
            original(trainer, state)
            with torch.no_grad():
                change(trainer)

        return restore

    return replaced("reference_trainer.checkpoint", "_restore", make)


def moments(change: Callable[[Tensor], Tensor], *, of: str, name: str = "") -> AbstractContextManager[None]:
    """Change a kind of optimizer state, of all parameters whose names begin so."""

    def change_trainer(trainer: Trainer) -> None:
        for parameter_name, parameter in trainer.model.named_parameters():
            state = trainer.optimizer.state[parameter]
            if parameter_name.startswith(name) and of in state:
                local(state[of]).copy_(change(local(state[of])))

    return after_resume(change_trainer)


def steps_counted(by: float) -> AbstractContextManager[None]:
    return moments(lambda count: count + by, of="step")


def clear_moments(trainer: Trainer) -> None:
    trainer.optimizer.state.clear()


def load_moments_again(trainer: Trainer) -> None:
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())


def restart_schedule(trainer: Trainer, *, at: int | None) -> None:
    schedule = trainer.schedule
    schedule.load_state_dict(schedule.state_dict() | ({} if at is None else {"last_epoch": at, "_step_count": at + 1}))


def seed_again(trainer: Trainer, *, forget: bool) -> None:
    state = torch.get_rng_state()
    trainer._seed_dropout()
    if not forget:
        torch.set_rng_state(state)


def rolled_shards(trainer: Trainer, *, by: int) -> None:
    """Of all matrices, the rows of each rank's shard."""
    for parameter in trainer.model.parameters():
        part = local(parameter)
        if part.ndim > 1:
            part.copy_(part.roll(by, 0))


def steps_done(change: int) -> AbstractContextManager[None]:
    """Change the number of steps that a checkpoint says were done."""

    def make(original: Any) -> Any:
        def newest_checkpoint(*args: Any) -> Any:
            path, manifest = original(*args)
            return path, msgspec.structs.replace(manifest, steps_done=manifest.steps_done + change)

        return newest_checkpoint

    return replaced("reference_trainer.checkpoint", "newest_checkpoint", make)


def staged(*, twice: bool) -> AbstractContextManager[None]:
    """What an asynchronous save writes: a copy of a copy, or the run's own tensors."""

    def make(original: Any) -> Any:
        def stage(writer: Any, state_dict: dict[str, Any]) -> Any:
            return original(writer, original(writer, state_dict)) if twice else state_dict

        return stage

    return replaced("torch.distributed.checkpoint.filesystem:FileSystemWriter", "stage", make)


def _zeros(value: Tensor) -> Tensor:
    return torch.zeros_like(value)


def _same(value: Tensor) -> Tensor:
    return value.clone()


DEFECTS = (
    Defect(
        id="partial-load-strict-false",
        title="a parameter that a checkpoint lacks keeps what to_empty handed out",
        source="https://github.com/pytorch/pytorch/issues/149516",
        mechanism="one weight is left out of the load, without an error",
        laws=("INIT-1", "INIT-2", "INIT-4"),
        inject=partial(skipped_key, skip=True),
        inject_twin=partial(skipped_key, skip=False),
    ),
    Defect(
        id="load-rank-local",
        title="a rank loads a file of its own",
        source="https://github.com/allenai/OLMo-core/issues/319",
        mechanism="the second rank's shards are of other weights than the first's",
        laws=("INIT-2", "INIT-4"),
        inject=partial(after_load, partial(own_file, differs=True)),
        inject_twin=partial(after_load, partial(own_file, differs=False)),
    ),
    Defect(
        id="resume-moments-lost",
        title="a resumed run begins with a new optimizer state",
        source="https://github.com/huggingface/transformers/issues/25849",
        mechanism="the optimizer's state is empty after it was loaded",
        laws=("CKPT-1",),
        inject=partial(after_resume, clear_moments),
        inject_twin=partial(after_resume, load_moments_again),
    ),
    Defect(
        id="resume-one-moment-lost",
        title="one kind of moment of one layer is not restored",
        source="https://github.com/databricks/flashoptim/issues/3",
        mechanism="exp_avg_sq of the first layer is zero after it was loaded",
        laws=("CKPT-1",),
        inject=partial(moments, _zeros, of="exp_avg_sq", name="layers.0."),
        inject_twin=partial(moments, _same, of="exp_avg_sq", name="layers.0."),
    ),
    Defect(
        id="resume-step-off",
        title="the optimizer's step counter is restored off by one",
        source="https://github.com/NVIDIA/Megatron-LM/issues/5974",
        mechanism="one is added to the counter that corrects the moments' bias",
        laws=("CKPT-1",),
        inject=partial(steps_counted, 1.0),
        inject_twin=partial(steps_counted, 0.0),
    ),
    Defect(
        id="resume-schedule-lost",
        title="the learning rate begins anew",
        source="https://github.com/pytorch/torchtitan/issues/809",
        mechanism="the schedule's counter is set to 0 after it was loaded",
        laws=("CKPT-1",),
        inject=partial(after_resume, partial(restart_schedule, at=0)),
        inject_twin=partial(after_resume, partial(restart_schedule, at=None)),
    ),
    Defect(
        id="resume-rng-lost",
        title="random numbers begin anew",
        source="https://github.com/pytorch/torchtitan/issues/816",
        mechanism="the generator is seeded as at the start of a run",
        laws=("CKPT-1",),
        inject=partial(after_resume, partial(seed_again, forget=True)),
        inject_twin=partial(after_resume, partial(seed_again, forget=False)),
    ),
    Defect(
        id="resume-data-off",
        title="the last step before the checkpoint is done again",
        source="https://github.com/pytorch/torchtitan/issues/816",
        mechanism="the number of steps that are done is one too small",
        laws=("CKPT-1",),
        inject=partial(steps_done, -1),
        inject_twin=partial(steps_done, 0),
    ),
    Defect(
        id="resharded-rows-permuted",
        title="rows of a shard come back in another order",
        source="https://github.com/pytorch/pytorch/issues/149516",
        mechanism="each rank's shards of matrices are rolled by a row after they were loaded",
        laws=("CKPT-2",),
        inject=partial(after_resume, partial(rolled_shards, by=1)),
        inject_twin=partial(after_resume, partial(rolled_shards, by=0)),
    ),
    Defect(
        id="async-save-aliases",
        title="an asynchronous save writes what later steps have made of the state",
        source="https://github.com/pytorch/pytorch/issues/144657",
        mechanism="the state is staged without a copy",
        laws=("CKPT-3",),
        inject=partial(staged, twice=False),
        inject_twin=partial(staged, twice=True),
    ),
)
