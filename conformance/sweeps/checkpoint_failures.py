"""Saves that fail on one rank: each must raise on all ranks, at once or in its future, and the next must succeed."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from conformance.experiments.context import RankWorld, experiment
from conformance.run.experiment import Needs
from conformance.sweeps.checkpoints import Groups, fault, finish, numbers, placed, plain_errors
from conformance.sweeps.trials import Swept, Trials
from reference_trainer.mesh import fsdp_mesh

_FAILING = 1
"""Rank that fails."""
_MEETING_S = 5.0
"""Time in which the thread that fails must have begun."""


class DiskFull(OSError):
    """Error of the rank that fails."""


class FailingFiles(FileSystem):
    """Files of which none can be written by the thread that writes, or by the one beside it."""

    def __init__(self, thread: str) -> None:
        self.calling = threading.current_thread()
        self._fails_in_caller = thread == "calling"
        self._failing_has_begun = threading.Event()

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file; raises DiskFull in the thread that fails."""
        if mode == "wb":
            if (threading.current_thread() is self.calling) == self._fails_in_caller:
                self._failing_has_begun.set()
                raise DiskFull("no space left")
            self._failing_has_begun.wait(_MEETING_S)  # else this thread may take all files, and none fails
        with super().create_stream(path, mode) as stream:
            yield stream


class FailingWriter(FileSystemWriter):
    """Writer of failing files, which tells them the thread that calls it."""

    def __init__(self, folder: Path, thread: str, count: int) -> None:
        super().__init__(folder, thread_count=count)
        self._files = FailingFiles(thread)
        if dist.get_rank() == _FAILING:
            self.fs = self._files

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write; raises DiskFull, or not, as the files do."""
        self._files.calling = threading.current_thread()
        return super().write_data(plan, planner)


class FailingPlanner(DefaultSavePlanner):
    """Planner that fails on one rank, where it plans or where it gets the data."""

    def __init__(self, moment: str) -> None:
        super().__init__()
        self._moment = moment

    def create_local_plan(self) -> Any:
        """Plan; raises DiskFull if that fails."""
        if self._moment == "planning" and dist.get_rank() == _FAILING:
            raise DiskFull("no plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        """Plan for all ranks; raises DiskFull if that fails."""
        if self._moment == "planning for all":
            raise DiskFull("no plan for all")
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: Any) -> Any:
        """Return the data to write; raises DiskFull if that fails."""
        if self._moment == "reading" and dist.get_rank() == _FAILING:
            raise DiskFull("no data")
        return super().resolve_data(write_item)


Save = Callable[..., Any]
_SAVES: Mapping[str, Save] = {"save": save, "async_save": async_save}


def _fails_in_thread(thread: str, count: int) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"storage_writer": FailingWriter(folder, thread, count)}


def _fails_in_planner(moment: str) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"checkpoint_id": folder, "planner": FailingPlanner(moment)}


FAILURES: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "the only thread": _fails_in_thread("calling", 1),
    "the calling thread of two": _fails_in_thread("calling", 2),
    "the other thread of two": _fails_in_thread("other", 2),
    **{moment: _fails_in_planner(moment) for moment in ("planning", "planning for all", "reading")},
    "an existing checkpoint": lambda folder: {"storage_writer": FileSystemWriter(folder, overwrite=False)},
}
"""Options with which a save fails, by the failing action."""


def _state(time: int, mesh: DeviceMesh) -> dict[str, Tensor]:
    return {name: placed(full, mesh, (Shard(0),)) for name, full in _full(time).items()}


def _full(time: int) -> dict[str, Tensor]:
    return {"uneven": numbers((5, 3), 2 * time), "even": numbers((8, 2), 2 * time + 1)}


@experiment(needs=Needs.SHARDING)
def sweep(rank: RankWorld) -> Swept:
    """Let each function fail in each way, on a file system with an older checkpoint, and save once more."""
    trials, groups = Trials(fsdp_mesh(rank.mesh)), Groups()
    mesh = DeviceMesh(rank.device.type, [*range(rank.size)])
    for function in _SAVES:
        for failure in FAILURES:
            subject = f"{function}, {failure} fails"
            if not rank.subjects or subject in rank.subjects:
                folder = rank.directory / subject
                call = partial(_differences, function, failure, folder, mesh, groups)
                trials.attempt(subject, "failures", "3 saves", call, may_refuse=False)
    return trials.swept


@plain_errors()
def _differences(
    function: str, failure: str, folder: Path, mesh: DeviceMesh, groups: Groups, trial: DeviceMesh
) -> dict[str, str]:
    group = groups.world(trial)
    save(_state(0, mesh), checkpoint_id=folder, process_group=group)
    is_raised = torch.ones(1)
    try:
        finish(_SAVES[function](_state(1, mesh), process_group=group, **FAILURES[failure](folder)))
        is_raised.zero_()
    except (DiskFull, CheckpointException, RuntimeError):
        pass
    others = groups.world(trial, number=1)  # of which the failed save has not used any
    everywhere = is_raised.clone()
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=others)
    if not everywhere:
        return {} if is_raised else {"error": "the save ended as if it had written everything"}
    # What another folder gets is whole, and an existing checkpoint that may not be replaced is as it was.
    again = folder.with_name(f"{folder.name} again")
    save(_state(2, mesh), checkpoint_id=again, process_group=others)
    kept = {again: 2}
    if failure in ("an existing checkpoint", "planning", "planning for all"):
        kept[folder] = 0
    found: dict[str, str] = {}
    for each, time in kept.items():
        state = _state(3, mesh)
        load(state, storage_reader=FileSystemReader(each), process_group=others)
        for name, full in _full(time).items():
            if text := fault(state[name], full):
                found.setdefault("values", f"{each.name}, {name}: {text}")
    return found
