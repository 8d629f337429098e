"""Checkpoints of a run: all that its next step depends on, so that a resumed run goes on as if it had never stopped.

`DIRECTORY/step-00000020` is the state after 20 steps: files of torch.distributed.checkpoint, and `manifest.json`, which
lists them. It is written under another name and renamed when all of it is on disk: a save that is killed changes
nothing that was there. The data position is the number of steps: batches depend on it alone. All ranks must see the
directory.
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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from reference_trainer.checks import require
from reference_trainer.config import TrainerConfig
from reference_trainer.mesh import dp_rank
from reference_trainer.progress import LoadPlanner, SavePlanner
from reference_trainer.train import Trainer
from reference_trainer.weights import read_dcp_metadata

if TYPE_CHECKING:
    from concurrent.futures import Future

_FORMAT = 1
_MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{8})")
_MUST_AGREE = ("model", "optimizer", "data", "seed", "steps")
"""Fields without which a resumed run would not be the same run; mesh, precision and the like may change."""
_SCALE = ("scale", "_growth_tracker")
"""What changes of the loss scaler's state; the rest is configuration."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint is; its presence says that the checkpoint is complete."""

    format: int
    steps_done: int
    torch: str
    config: TrainerConfig
    files: dict[str, int]
    """Name of each file to its bytes."""


class Checkpoints:
    """Saves a run's checkpoints in a directory, which must not hold those of another run. Collective on all ranks.

    With `asynchronous`, `save` copies the state and returns; a thread writes it while training goes on.
    Raises ValueError if the directory holds checkpoints and the run does not resume from it.
    """

    def __init__(self, directory: Path, *, asynchronous: bool = False, resumed: bool = False) -> None:
        self._directory, self._asynchronous = directory, asynchronous
        # A thread's collectives need a group of their own, on the CPU.
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
        """Save the state after so many steps; if asynchronous, after waiting for the save before."""
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
        """Wait until the last save is complete. Raises what went wrong in it."""
        if self._pending is not None:
            self._pending[0].result()
            self.poll()
            self._pending = None
            dist.barrier()

    def poll(self) -> None:
        """To be called now and then: completes an asynchronous save as soon as all ranks have written their parts."""
        # Rank 0 is done when it has written the index, for which it has heard from all others.
        if self._pending is not None and dist.get_rank() == 0 and self._pending[0].done():
            written, unfinished, manifest = self._pending
            written.result()
            if unfinished.exists():
                _complete(unfinished, manifest)

    def storage(self, directory: Path) -> FileSystemWriter:
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
    """Raises ValueError for a run whose state is not in the form that checkpoints have."""
    require(
        config.implementation == "fsdp2",
        f"implementation {config.implementation} is for comparison alone, and has no checkpoints: leave out saving and "
        "resuming, or use implementation fsdp2",
    )


def require_no_checkpoints(directory: Path) -> None:
    """Raises ValueError if there are some: a new run must not mix its own with them."""
    require(
        not _steps(directory), f"{directory} already holds checkpoints: resume from it, or save in another directory"
    )


def newest_checkpoint(directory: Path, config: TrainerConfig) -> tuple[Path, Manifest]:
    """The last complete checkpoint of a run. Raises ValueError if there is none, it is damaged, or of another run."""
    steps = _steps(directory)
    require(bool(steps), f"{directory} holds no checkpoint: a directory step-00000001 or the like with {_MANIFEST}")
    path = steps[-1]
    try:
        manifest = msgspec.json.decode((path / _MANIFEST).read_bytes(), type=Manifest)
    except (msgspec.MsgspecError, ValueError, OSError) as error:
        raise ValueError(f"checkpoint {path}: {_MANIFEST} cannot be read: {error}") from None
    require(manifest.format == _FORMAT, f"checkpoint {path} has format {manifest.format}, this trainer {_FORMAT}")
    for name, nbytes in manifest.files.items():
        file = path / name
        require(file.is_file(), f"checkpoint {path} is damaged: {name} is missing")
        found = file.stat().st_size
        require(found == nbytes, f"checkpoint {path} is damaged: {name} has {found} bytes, was written with {nbytes}")
    for field in _MUST_AGREE:
        saved, ours = getattr(manifest.config, field), getattr(config, field)
        require(saved == ours, f"checkpoint {path} is of another run: its {field} is {saved}, this run's is {ours}")
    return path, manifest


@torch.no_grad()
def resume(trainer: Trainer, directory: Path) -> int:
    """Put the newest checkpoint's state into a new trainer; returns how many steps are done.

    The mesh may be another than the one that saved. Where it is the same, each rank's random numbers go on too.
    Raises ValueError as `newest_checkpoint` does, or if the files cannot be read.
    """
    path, manifest = newest_checkpoint(directory, trainer.config)
    stored = read_dcp_metadata(path).state_dict_metadata
    state = _state(trainer)
    if f"loss_scale.{_SCALE[0]}" not in stored:  # saved with another precision: the scale begins anew
        state.pop("loss_scale", None)
    state["rng"] = {key: value for key, value in state["rng"].items() if f"rng.{key}" in stored}
    try:
        load(state, checkpoint_id=path, planner=LoadPlanner(title=f"load {path.name}"))
    except CheckpointException as error:
        reason = "; ".join(sorted({repr(failure[0]) for failure in error.failures.values()}))
        raise ValueError(f"checkpoint {path} cannot be loaded: {reason}") from None
    _restore(trainer, state)
    trainer.observer.resumed(trainer.model, trainer.optimizer)
    return manifest.steps_done


def _state(trainer: Trainer) -> dict[str, Any]:
    """Everything to save, with tensors that are the run's own. Raises ValueError for what cannot be saved."""
    check_can_be_saved(trainer.config)
    model, optimizer = _state_dicts(trainer)
    names = trainer.mesh.mesh_dim_names or ()
    tp_rank = trainer.mesh.get_local_rank("tp") if "tp" in names else 0
    place = f"{trainer.dims.dp}x{trainer.dims.tp}.{dp_rank(trainer.mesh)}.{tp_rank}"
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": trainer.schedule.state_dict(),
        "rng": {place: _random_state(trainer.device)},
        **({"loss_scale": trainer.scaler.state_dict()} if trainer.scaler.is_enabled() else {}),
    }


def _state_dicts(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of model and optimizer. For an optimizer that has not stepped yet, torch lets it step with gradients of zero
    (`_init_optim_state` in torch/distributed/checkpoint/state_dict.py): moments stay zero, but a step is counted.
    """
    before = bool(trainer.optimizer.state)
    found = get_state_dict(trainer.model, trainer.optimizer)
    for state in () if before else trainer.optimizer.state.values():
        if "step" in state:
            state["step"].zero_()
    return found


def _restore(trainer: Trainer, state: dict[str, Any]) -> None:
    """Parameters hold what was loaded already; the rest is handed over."""
    set_state_dict(
        trainer.model, trainer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    trainer.schedule.load_state_dict(state["schedule"])
    for value in state["rng"].values():
        _set_random_state(trainer.device, value)
    if "loss_scale" in state:
        own = trainer.scaler.state_dict()
        trainer.scaler.load_state_dict({**own, **{key: state["loss_scale"][key] for key in _SCALE}})


def _random_state(device: torch.device) -> torch.Tensor:
    """What dropout draws from: the generator of the device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _steps(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("step-*") if _STEP.fullmatch(path.name))


def _sync(directory: Path) -> None:
    """Names in a directory are on disk only after this."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
