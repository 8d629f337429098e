"""Checkpoints in sweeps: their process groups, and state whose values every rank knows before it is saved or loaded."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from conformance.experiments.context import RankWorld
from conformance.instruments.sharding import local
from conformance.sweeps.covering_sweep import CoveringSweep, Options
from conformance.sweeps.drawing import share_of
from conformance.sweeps.layouts import Layout, difference, distributed, integers, is_member, placed_shard
from conformance.sweeps.trials import Ended, Swept, Trials

_WAIT_LIMIT = timedelta(seconds=10)
"""Time limit of the groups; ranks write files in it, for which the short limit of a trial's mesh is too low."""


class Groups:
    """Process groups that save and load; a trial that ended without agreement has left those before it unusable."""

    def __init__(self) -> None:
        self._mesh: DeviceMesh | None = None
        self._groups: dict[tuple[tuple[int, ...], int], Any] = {}

    def of(self, mesh: DeviceMesh, ranks: Sequence[int], *, number: int = 0) -> Any:
        """Return a group of ranks for trials on this mesh, `number` of several equal ones. All ranks call it."""
        if mesh is not self._mesh:
            self._mesh, self._groups = mesh, {}
        key = tuple(ranks), number
        if key not in self._groups:
            self._groups[key] = dist.new_group(list(ranks), timeout=_WAIT_LIMIT)
        return self._groups[key]

    def world(self, mesh: DeviceMesh, *, number: int = 0) -> Any:
        """Return a group of all ranks."""
        return self.of(mesh, range(dist.get_world_size()), number=number)


def numbers(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a full tensor of whole numbers up to 100, the same on all ranks; bf16 and int8 have them all."""
    return integers(*shape, low=-100, high=100, seed=seed).to(dtype)


def fitting(layout: Sequence[Placement], ndim: int) -> Layout:
    """Return a layout for tensors of this many dimensions: replicas instead of shards along others."""
    return tuple(at if getattr(at, "dim", -1) < ndim else Replicate() for at in layout)


def placed(full: Tensor, mesh: DeviceMesh | None, layout: Layout) -> Tensor:
    """Return a new tensor on a mesh, of which a rank outside holds nothing; plain without a mesh."""
    if mesh is None:
        return full.clone()
    layout = fitting(layout, full.ndim)
    if is_member(mesh):
        return distributed(full, mesh, layout)
    return distribute_tensor(full, mesh, layout)


def fault(measured: Any, full: Any) -> str:
    """Return how a loaded value differs from the saved one in any bit; empty if it does not. No collective."""
    if isinstance(measured, DTensor):
        if not is_member(measured.device_mesh):
            return ""
        measured, full = measured.to_local(), placed_shard(full, measured.device_mesh, tuple(measured.placements))
    if not isinstance(full, Tensor):
        return "" if type(measured) is type(full) and measured == full else f"{measured!r:.60}, expected {full!r:.60}"
    if not isinstance(measured, Tensor):
        return f"{type(measured).__name__}, expected a tensor"
    if measured.is_meta:
        return "on meta"
    return difference(measured, full, bound=0.0)


def spoiled(state: Any) -> Any:
    """Return a copy of a nested state with other values of the same types and layouts, to load into."""
    if isinstance(state, Tensor):
        state = state.clone()
        local(state).fill_(77)
        return state
    if isinstance(state, Mapping):
        return type(state)((key, spoiled(value)) for key, value in state.items())  # type: ignore[call-arg]
    if isinstance(state, (list, deque)):
        return type(state)(spoiled(value) for value in state)
    if is_dataclass(state) and not isinstance(state, type):
        return replace(state, **{each.name: spoiled(getattr(state, each.name)) for each in fields(state)})
    return type(state)(-1) if isinstance(state, (int, float)) else "other" if isinstance(state, str) else state


def finish(started: Any) -> None:
    """Wait until a checkpoint is written; raises the error of an asynchronous save."""
    future = getattr(started, "upload_completion", started)
    if isinstance(future, Future):
        future.result()


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise RuntimeError instead of CheckpointException, which is no Exception; its text has each rank's own error."""
    try:
        yield
    except CheckpointException as error:
        failures = (f"rank {rank}: {failure[0]!r:.150}" for rank, failure in error.failures.items())
        raise RuntimeError("; ".join(failures)) from error


def sweep_rows(
    rank: RankWorld,
    mesh: DeviceMesh,
    faults: Callable[[Options, Path, DeviceMesh], Mapping[str, str]],
    *,
    more: Callable[[Options], Iterable[Hashable]] = lambda _row: (),
    **options: Any,
) -> Swept:
    """Try a covering sweep with these options on a mesh like this one, each row in a new directory.

    Two ranks try rows with each value of each option, and one of each kind that `more` gives, which the seed of the
    cell draws.
    """
    trials, numbers_of_rows = Trials(mesh), count()

    def ended(row: Options) -> Ended:
        directory = rank.directory / f"row {next(numbers_of_rows)}"
        end = trials.ended(plain_errors()(partial(faults, row, directory)))
        if rank.rank == 0:
            rmtree(directory, ignore_errors=True)
        return end

    draw = partial(_with_each_value, more=more, seed=rank.config.seed) if rank.size == 2 else None
    return CoveringSweep(ended=ended, strength=2, draw=draw, **options).swept(rank.subjects)


def _with_each_value(
    rows: Sequence[Options], *, more: Callable[[Options], Iterable[Hashable]], seed: int
) -> list[Options]:
    return share_of(rows, lambda row: [*row.items(), *more(row)], share=0.0, seed=seed)
