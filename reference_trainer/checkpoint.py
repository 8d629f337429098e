"""Checkpoints of a run: the whole state of its next step, so that a resumed run equals an uninterrupted one.

`DIRECTORY/step-00000020` is the state after 20 steps: files of torch.distributed.checkpoint, and `manifest.json`, which
lists them. A checkpoint is written under another name and renamed when all of it is on disk: a save that is killed
leaves older checkpoints as they are. The data position is the number of steps: batches depend on that number alone. All
ranks must see the directory.
"""

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from reference_trainer.checks import UsageError, require
from reference_trainer.config import OptimizerConfig, TrainerConfig
from reference_trainer.mesh import dp_rank
from reference_trainer.optim import lr_decay_steps
from reference_trainer.progress import LoadPlanner, SavePlanner
from reference_trainer.train import Trainer
from reference_trainer.weights import read_dcp_metadata

if TYPE_CHECKING:
    from concurrent.futures import Future

_FORMAT = 2
_MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{8})")
_MUST_AGREE = ("model", "optimizer", "data", "seed")
"""Fields in which a resumed run must equal the saved run; mesh, precision and the like may change. The optimizer's
`lr_decay_steps`, and `steps`, may change as `_require_same_run` says."""
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
"""The optimizer's state by parameter, without the lists of its groups, which differ between stages of a pipeline."""
_SCALE = ("scale", "_growth_tracker")
"""Entries of the loss scaler's state that change; the others are configuration."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of a checkpoint, whose presence marks the checkpoint as complete."""

    format: int
    steps_done: int
    torch: str
    config: TrainerConfig
    files: dict[str, int]
    """Size of each file in bytes, by name."""


class Checkpoints:
    """Writer of a run's checkpoints into one directory, which must not hold those of another run.

    Every method must be called on all ranks. With `asynchronous`, `save` copies the state and returns; a thread writes
    the copy while training goes on. Raises UsageError if the directory holds checkpoints and the run does not resume
    from it.
    """

    def __init__(self, directory: Path, *, asynchronous: bool = False, resumed: bool = False) -> None:
        self._directory, self._asynchronous = directory, asynchronous
        # A thread's collectives need a separate group, on the CPU.
        self._group = dist.new_group(backend="gloo") if asynchronous else None
        self._pending: tuple[Future[Any], Path, Manifest] | None = None
        if not resumed:
            require_no_checkpoints(directory)
        if dist.get_rank() == 0:
            directory.mkdir(parents=True, exist_ok=True)
            for unfinished in directory.glob(".step-*"):
                shutil.rmtree(unfinished)
        dist.barrier()

    def save(self, trainer: Trainer, *, steps_done: int) -> None:
        """Save the state after `steps_done` steps; if asynchronous, wait for the previous save first."""
        self.finish()
        name = f"step-{steps_done:08}"
        manifest = Manifest(_FORMAT, steps_done, str(torch.__version__), trainer.config, {})
        unfinished = self._directory / f".{name}"
        state, storage = _state(trainer), self.storage(unfinished)
        planner = SavePlanner(title=f"save {name}")
        if self._asynchronous:
            written = async_save(state, storage_writer=storage, planner=planner, process_group=self._group)
            self._pending = cast("Future[Any]", written), unfinished, manifest
        else:
            save(state, storage_writer=storage, planner=planner)
            if dist.get_rank() == 0:
                _complete(unfinished, manifest)
            dist.barrier()

    def finish(self) -> None:
        """Wait until the last save is complete. Raises the error of an asynchronous save that went wrong."""
        if self._pending is not None:
            self._pending[0].result()
            self.poll()
            self._pending = None
            dist.barrier()

    def poll(self) -> None:
        """Complete an asynchronous save if all ranks have written their shards; to be called now and then."""
        # Rank 0 is done when it has written the index, for which it has heard from all others.
        if self._pending is not None and dist.get_rank() == 0 and self._pending[0].done():
            written, unfinished, manifest = self._pending
            written.result()
            if unfinished.exists():
                _complete(unfinished, manifest)

    def storage(self, directory: Path) -> FileSystemWriter:
        """Return the writer of the files of one checkpoint."""
        return FileSystemWriter(directory)


def _complete(unfinished: Path, manifest: Manifest) -> None:
    """List the files and give the directory its name, on disk, in this order. All ranks have written."""
    files = {file.name: file.stat().st_size for file in sorted(unfinished.iterdir())}
    with (unfinished / _MANIFEST).open("wb") as file:
        file.write(msgspec.json.encode(msgspec.structs.replace(manifest, files=files)))
        file.flush()
        os.fsync(file.fileno())
    _sync(unfinished)
    unfinished.rename(unfinished.with_name(unfinished.name.removeprefix(".")))
    _sync(unfinished.parent)


def check_can_be_saved(config: TrainerConfig) -> None:
    """Raise UsageError for a run whose state is not in the form that checkpoints have."""
    require(
        config.implementation == "fsdp2",
        f"implementation {config.implementation} is for comparison alone, and has no checkpoints: leave out saving and "
        "resuming, or use implementation fsdp2",
    )


def require_no_checkpoints(directory: Path) -> None:
    """Raise UsageError if a directory holds checkpoints: a new run must not mix its own with them."""
    require(
        not _steps(directory), f"{directory} already holds checkpoints: resume from it, or save in another directory"
    )


def newest_checkpoint(directory: Path, config: TrainerConfig) -> tuple[Path, Manifest]:
    """Return the last complete checkpoint of a run, and its manifest.

    Raises UsageError if there is none, and if the last one is damaged, of another run, or beyond the run's steps.
    """
    steps = _steps(directory)
    require(bool(steps), f"{directory} holds no checkpoint: a directory step-00000001 or the like with {_MANIFEST}")
    path = steps[-1]
    try:
        manifest = msgspec.json.decode((path / _MANIFEST).read_bytes(), type=Manifest)
    except (msgspec.MsgspecError, ValueError, OSError) as error:
        raise UsageError(f"checkpoint {path}: {_MANIFEST} cannot be read: {error}") from None
    require(manifest.format == _FORMAT, f"checkpoint {path} has format {manifest.format}, this trainer {_FORMAT}")
    for name, nbytes in manifest.files.items():
        file = path / name
        require(file.is_file(), f"checkpoint {path} is damaged: {name} is missing")
        size = file.stat().st_size
        require(size == nbytes, f"checkpoint {path} is damaged: {name} has {size} bytes, was written with {nbytes}")
    _require_same_run(path, manifest, config)
    return path, manifest


def _require_same_run(path: Path, manifest: Manifest, config: TrainerConfig) -> None:
    """Raise UsageError if the run cannot continue from the checkpoint like an uninterrupted one.

    A run may have more steps than it was saved with, as long as its learning rate falls over as many as before.
    """
    saved = manifest.config
    for field in _MUST_AGREE:
        theirs, ours = (_without_lr_decay_steps(getattr(run, field)) for run in (saved, config))
        require(theirs == ours, f"checkpoint {path} is of another run: its {field} is {theirs}, this run's is {ours}")
    theirs, ours = lr_decay_steps(saved), lr_decay_steps(config)
    require(
        theirs == ours,
        f"checkpoint {path} is of a run whose learning rate falls over {theirs} steps, this run's over {ours}: set "
        f"optimizer.lr_decay_steps={theirs}; the rate then stays where it is after them",
    )
    require(
        config.steps >= manifest.steps_done,
        f"checkpoint {path} has done {manifest.steps_done} steps, but steps is {config.steps}: set steps to what the "
        "run is to have in all",
    )


def _without_lr_decay_steps(section: object) -> object:
    return msgspec.structs.replace(section, lr_decay_steps=None) if isinstance(section, OptimizerConfig) else section


@torch.no_grad()
def resume(trainer: Trainer, directory: Path) -> int:
    """Load the newest checkpoint's state into a new trainer; returns the number of steps done.

    The mesh may be another than the one that saved. If it is the same, each rank's random numbers go on, too. Raises
    UsageError as `newest_checkpoint` does, or if the files cannot be read.
    """
    path, manifest = newest_checkpoint(directory, trainer.config)
    stored = read_dcp_metadata(path).state_dict_metadata
    state = _state(trainer)
    if f"loss_scale.{_SCALE[0]}" not in stored:  # saved with another precision: the scale begins again
        state.pop("loss_scale", None)
    state["rng"] = {key: value for key, value in state["rng"].items() if f"rng.{key}" in stored}
    try:
        load(state, checkpoint_id=path, planner=LoadPlanner(title=f"load {path.name}"))
    except CheckpointException as error:
        reason = "; ".join(sorted({repr(failure[0]) for failure in error.failures.values()}))
        raise UsageError(f"checkpoint {path} cannot be loaded: {reason}") from None
    _restore(trainer, state)
    trainer.observer.resumed(trainer.model, trainer.optimizer)
    return manifest.steps_done


def _state(trainer: Trainer) -> dict[str, Any]:
    """Return the state to save, with the run's own tensors. Raises UsageError for a run that cannot be saved."""
    check_can_be_saved(trainer.config)
    model, optimizer = _state_dicts(trainer)
    names = trainer.mesh.mesh_dim_names or ()
    tp_rank = trainer.mesh.get_local_rank("tp") if "tp" in names else 0
    rank_of_mesh = f"{trainer.dims.dp}x{trainer.dims.tp}.{dp_rank(trainer.mesh)}.{tp_rank}"
    if trainer.dims.pp > 1:
        rank_of_mesh += f".{trainer.dims.pp}.{trainer.mesh.get_local_rank('pp')}"
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": trainer.schedule.state_dict(),
        "rng": {rank_of_mesh: _random_state(trainer.device)},
        **({"loss_scale": trainer.scaler.state_dict()} if trainer.scaler.is_enabled() else {}),
    }


def _state_dicts(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """States of model and optimizer.

    torch lets an optimizer that has not stepped yet step with gradients of zero (`_init_optim_state` in
    torch/distributed/checkpoint/state_dict.py). That counts a step, and SGD with momentum puts the decay of the
    parameters into its buffers; both are undone here.
    """
    has_stepped = bool(trainer.optimizer.state)
    states = get_state_dict(trainer.model, trainer.optimizer, options=_OPTIONS)
    for state in () if has_stepped else trainer.optimizer.state.values():
        for value in state.values():
            value.zero_()
    return states


def _restore(trainer: Trainer, state: dict[str, Any]) -> None:
    """Hand the loaded state over to the trainer; parameters hold theirs already."""
    set_state_dict(
        trainer.model,
        trainer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_OPTIONS,
    )
    trainer.update_scales()
    trainer.schedule.load_state_dict(state["schedule"])
    for value in state["rng"].values():
        _set_random_state(trainer.device, value)
    if "loss_scale" in state:
        own = trainer.scaler.state_dict()
        trainer.scaler.load_state_dict({**own, **{key: state["loss_scale"][key] for key in _SCALE}})


def _random_state(device: torch.device) -> torch.Tensor:
    """State of the generator from which dropout samples: that of the device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _steps(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("step-*") if _STEP.fullmatch(path.name))


def _sync(directory: Path) -> None:
    """Flush a directory to disk, which makes the names of its files durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
