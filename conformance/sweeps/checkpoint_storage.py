"""Options of saving and loading, any three together: writers, planners, stagers and functions, three times each.

A state on all ranks is saved three times while its tensors change: in place after each save, as a training does, and
before the third save one grows and one is added. Each checkpoint must hold the values of its own call.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load, load_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save, save, save_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from conformance.covering_arrays.combinations import Rule
from conformance.experiments.context import RankWorld, experiment
from conformance.instruments.sharding import local
from conformance.run.experiment import Needs
from conformance.sweeps.checkpoint_extension import Inverting, registry
from conformance.sweeps.checkpoints import Groups, fault, finish, numbers, placed, spoiled, sweep_rows
from conformance.sweeps.covering_sweep import Options, forbids, needs
from conformance.sweeps.layouts import Layout
from conformance.sweeps.trials import Swept
from reference_trainer.mesh import fsdp_mesh

TIMES = 3
AXES: Mapping[str, tuple[Any, ...]] = {
    "saved by": ("save", "async_save", "save_state_dict"),
    "state": ("nested", "flat"),
    "objects": (False, True),
    "path": ("its own", "the same"),
    "writer": ("new", "kept", "found by path", "found by URL"),
    "single_file_per_rank": (True, False),
    "sync_files": (True, False),
    "thread_count": (1, 3),
    "per_thread_copy_ahead": (10_000_000, 0),
    "_extensions": (0, 1, 2),
    "planner": ("new", "kept"),
    "flatten_state_dict": (True, False),
    "flatten_sharded_tensors": (True, False),
    "dedup_replicated_tensors": (None, True),
    "dedup_save_to_lowest_rank": (False, True),
    "enable_plan_caching": (False, True),
    "cache_staged_state_dict": (False, True),
    "stager": (
        "none",
        "default",
        "async staging",
        "shared memory",
        "blocking",
        "blocking and cached",
        "type check",
    ),
    "stagers": ("new", "kept"),
    "in flight": ("one", "three"),
    "use_collectives": (True, False),
    "coordinator_rank": (0, 1),
    "loaded by": ("load", "load_state_dict", "each rank alone", "dcp_to_torch_save"),
    "into": ("the same layouts", "other layouts", "plain tensors"),
    "allow_partial_load": (False, True),
}
"""Values of each option; the first is the default. A test compares them with the signatures of the installed torch."""


_TOGETHER, _ALONE = ("load", "load_state_dict"), ("each rank alone", "dcp_to_torch_save")
"""Functions with which all ranks load, and those with which one process does without the others."""


_FOUND = ("found by path", "found by URL")
"""Writers that torch chooses by the checkpoint's id: a path, or a URL for fsspec."""
_OF_WRITERS = (
    *("single_file_per_rank", "sync_files", "thread_count", "per_thread_copy_ahead", "_extensions"),
    *("cache_staged_state_dict", "path", "use_collectives"),
)
"""Options that a writer is made with, or that need one that may overwrite."""

RULES: tuple[Rule, ...] = (
    *needs(
        AXES,
        # Options of asynchronous saves alone, and of the deprecated functions alone.
        ("stager", "saved by", "async_save"),
        ("in flight", "saved by", "async_save"),
        ("stagers", "stager", *AXES["stager"][1:]),
        ("coordinator_rank", "saved by", "save_state_dict"),
        ("use_collectives", "saved by", "save", "async_save"),
        # A nested state that is not flattened is pickled, with this rank's shards.
        ("flatten_state_dict", "state", "flat"),
        # Writers and planners hold the state of the save that uses them; a stager has one copy of each tensor.
        ("writer", "in flight", "one"),
        *((option, "writer", "new", "kept") for option in _OF_WRITERS),
        ("planner", "in flight", "one"),
        ("cache_staged_state_dict", "saved by", "async_save"),
        ("cache_staged_state_dict", "stager", "none"),
        ("stagers", "in flight", "one"),
        ("path", "in flight", "one"),
        # The cache of plans belongs to the process.
        ("enable_plan_caching", "in flight", "one"),
        # Without coordination each rank has its own metadata, and loads what it has saved.
        ("into", "use_collectives", True),
        ("use_collectives", "loaded by", *_TOGETHER),
        # `dcp_to_torch_save` and a load by name know torch's own extensions alone.
        ("_extensions", "loaded by", *_TOGETHER),
        ("allow_partial_load", "loaded by", *_TOGETHER, "each rank alone"),
    ),
    # Documented: it refuses what is neither a tensor nor a number.
    forbids("objects", "stager", when=lambda objects, stager: objects and stager == "type check"),
    # The deprecated functions take writers alone.
    forbids("writer", "saved by", when=lambda writer, api: writer in _FOUND and api == "save_state_dict"),
    # One process alone loads full tensors.
    forbids("loaded by", "into", when=lambda api, into: api in _ALONE and into != "plain tensors"),
)
REFUSALS: tuple[Options, ...] = (
    # Pinned memory, which needs an accelerator.
    {"saved by": "async_save", "cache_staged_state_dict": True},
    {"saved by": "async_save", "stager": "blocking and cached"},
)
"""Options that torch refuses; any other error is a fault."""
SUSPECTS: tuple[Options, ...] = (
    *REFUSALS,
    # findings/objects_not_loaded_unflattened.py
    {"state": "flat", "flatten_state_dict": False},
)
"""Options that torch refuses or gets wrong: tried first, since narrowing a row down takes long."""

_LAYOUTS: Mapping[str, Layout] = {"rows": (Shard(0),), "columns": (Shard(1),), "replicas": (Replicate(),)}
_OTHER: Mapping[str, Layout] = {"rows": (Shard(1),), "columns": (Replicate(),), "replicas": (Shard(0),)}
_DTYPES = {"rows": torch.float32, "columns": torch.bfloat16, "replicas": torch.int8}
_ADDED, _GROWN, _ABSENT = "added", "columns", "absent"


def _default_stager(*options: bool) -> AsyncStager:
    """Return a stager with these `StagingOptions`; torch 2.7 has neither, and laws leave it out."""
    stager: AsyncStager = staging.DefaultStager(staging.StagingOptions(*options))
    return stager


STAGERS: Mapping[str, Callable[[], AsyncStager | None]] = {
    "none": lambda: None,
    "default": lambda: _default_stager(False, False, False, False),
    "async staging": lambda: _default_stager(False, False, True, False),
    "shared memory": lambda: _default_stager(False, True, False, False),
    "blocking": BlockingAsyncStager,
    "blocking and cached": lambda: BlockingAsyncStager(cache_staged_state_dict=True),
    "type check": lambda: BlockingAsyncStager(type_check=True),
}


@dataclass
class Position:
    """Object with attributes, of which a copy is made by its dictionary."""

    epoch: int


@dataclass(slots=True)
class Cursor:
    """Object with slots and without a dictionary."""

    sample: int


class Counter:
    """Object with a state dict, as the protocol `Stateful` asks for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        """Return the count, and a tensor of it."""
        return {"count": self.count, "tensor": torch.tensor([self.count])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the count; raises ValueError if the tensor has another."""
        self.count = state_dict["count"]
        if state_dict["tensor"].tolist() != [self.count]:
            raise ValueError(f"the tensor is {state_dict['tensor']}, the count {self.count}")


def full_values(time: int) -> dict[str, Any]:
    """Return the values of the time of a save, full and by path."""
    rows = 7 if time == TIMES - 1 else 5
    values: dict[str, Any] = {
        "rows": numbers((5, 3), 10 * time),
        "columns": numbers((rows, 6), 10 * time + 1, torch.bfloat16),
        "replicas": numbers((4, 4), 10 * time + 2, torch.int8),
        "plain": numbers((3, 2), 10 * time + 3, torch.float64),
        "transposed": numbers((3, 4), 10 * time + 4).t(),
        "slice": numbers((6, 4), 10 * time + 5)[1:3, ::2],
        "number": torch.tensor(time + 0.5),
        "empty": torch.zeros(0, 3),
        "epoch": time,
        "name": f"time {time}",
        "rate": 0.5**time,
        "nothing": None,
        "list": [time, "text", {"deep": time}],
    }
    if time == TIMES - 1:
        values[_ADDED] = numbers((2, 2), 99)
    return values


def objects_of(time: int) -> dict[str, Any]:
    """Return values of types of which a copy is made in different ways."""
    ordered = OrderedDict(first=numbers((2, 3), 10 * time + 6), second=time)
    return {
        "position": Position(time),
        "cursor": Cursor(time),
        "recent": deque([time, time + 0.5]),
        "ordered": ordered,
    }


def state_of(
    time: int, mesh: DeviceMesh | None, layouts: Mapping[str, Layout], *, nested: bool, objects: bool
) -> dict[str, Any]:
    """Return the state of a time with tensors on a mesh, or plain ones; if nested, also an object, and tied tensors."""
    values = full_values(time) | (objects_of(time) if objects else {})
    for name, layout in layouts.items():
        values[name] = placed(values[name], mesh, layout)
    if not nested:
        return values
    counter, tied = Counter(time), {"again": values["rows"]}
    optimizer = {"groups": [{"lr": values.pop("rate"), "params": ["rows"]}], "state": {0: values.pop("replicas")}}
    return {"model": values, "tied": tied, "optimizer": optimizer, "counter": counter}


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested state with their paths."""
    if isinstance(state, Counter):
        yield from leaves(state.state_dict(), path)
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves(value, f"{path}.{key}".lstrip("."))
    elif isinstance(state, list):
        for index, value in enumerate(state):
            yield from leaves(value, f"{path}.{index}")
    else:
        yield path, state


def in_place(old: Any, new: Any) -> Any:
    """Return the new state in the tensors of the old one, where their shapes are equal."""
    if isinstance(new, Tensor):
        if not isinstance(old, Tensor) or old.shape != new.shape:
            return new
        local(old).copy_(local(new))
        return old
    if isinstance(new, Mapping) and isinstance(old, Mapping):
        pairs = ((key, in_place(old.get(key), value)) for key, value in new.items())
        return OrderedDict(pairs) if isinstance(new, OrderedDict) else dict(pairs)
    if isinstance(new, list) and isinstance(old, list):
        return [in_place(*pair) for pair in zip(old, new, strict=True)]
    return new


def plain_dicts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the state of objects instead of objects, for functions that do not call them."""
    return {key: value.state_dict() if isinstance(value, Counter) else value for key, value in state.items()}


class Case:
    """Row of options, whose checkpoints are in a directory."""

    def __init__(self, options: Options, directory: Path, groups: Groups, mesh: DeviceMesh, trial: DeviceMesh) -> None:
        self._options, self._directory, self._groups = options, directory, groups
        self._mesh, self._trial = mesh, trial
        self._is_nested = options["state"] == "nested"
        self._kind = {"nested": self._is_nested, "objects": options["objects"]}
        # The cache of plans is the class's: rows with classes of their own cannot disturb each other.
        self._planner_class = type(f"Planner of {directory.name}", (DefaultSavePlanner,), {})
        self._kept: dict[str, Any] = {}

    def faults(self) -> dict[str, str]:
        """Save three times, and load each checkpoint: all after the last save, unless they replace each other."""
        try:
            return self._faults()
        finally:
            for stager in self._kept.get("stagers", []):
                stager.close()

    def _faults(self) -> dict[str, str]:
        saves: list[Any] = []
        found: dict[str, str] = {}
        state: dict[str, Any] = {}
        for time in range(TIMES):
            state = in_place(state, state_of(time, self._mesh, _LAYOUTS, **self._kind))
            saves.append(self._saved(state, time))
            self._train(state, saves[-1])
            if self._options["in flight"] == "one":
                finish(saves[-1])
            if self._options["path"] == "the same":
                found = {**self._loaded(time), **found}
        for started in saves:
            finish(started)
        if self._options["path"] == "its own":
            for time in range(TIMES):
                found = {**self._loaded(time), **found}
        return found

    def _folder(self, time: int) -> Path:
        return self._directory / ("same" if self._options["path"] == "the same" else f"{time}")

    def _id(self, time: int) -> str:
        return f"{'file://' * (self._options['writer'] == 'found by URL')}{self._folder(time)}"

    def _group(self, time: int) -> Any:
        """Return the group of a save; those at the same time must not mix up their collectives."""
        return self._groups.world(self._trial, number=time if self._options["in flight"] == "three" else 0)

    def _saved(self, state: dict[str, Any], time: int) -> Any:
        options, group = self._options, self._group(time)
        planner = self._planner()
        call: dict[str, Any] = {"planner": planner, "process_group": group}
        if options["writer"] in _FOUND:
            call["checkpoint_id"] = self._id(time)
        else:
            call["storage_writer"] = writer = self._writer(time)
        if options["saved by"] == "save_state_dict":
            rank = options["coordinator_rank"]
            writer.reset(self._folder(time))
            return save_state_dict(plain_dicts(state), writer, group, coordinator_rank=rank, planner=planner)
        if options["writer"] == "kept":
            call["checkpoint_id"] = self._folder(time)
        if not options["use_collectives"]:
            call["use_collectives"] = False
        if options["saved by"] == "save":
            return save(state, **call)
        if (stager := self._stager()) is not None:
            call["async_stager"] = stager
        return async_save(state, **call)

    def _train(self, state: dict[str, Any], started: Any) -> None:
        """Change all tensors in place as soon as that is allowed, and communicate as a training does."""
        if hasattr(started, "staging_completion"):
            started.staging_completion.result()
        for _, value in leaves(state):
            if isinstance(value, Tensor):
                local(value).add_(1)
        dist.all_reduce(torch.ones(1), group=self._groups.world(self._trial, number=TIMES))

    def _writer(self, time: int) -> FileSystemWriter:
        names = ("single_file_per_rank", "sync_files", "thread_count", "per_thread_copy_ahead")
        options = {name: self._options[name] for name in names}
        # Without coordination a slow rank takes for an old checkpoint what rank 0 has just written, see
        # findings/new_checkpoint_refused_to_slow_ranks.py.
        overwrite = self._options["path"] == "the same" or not self._options["use_collectives"]
        cached = self._options["cache_staged_state_dict"]

        def make() -> FileSystemWriter:
            return FileSystemWriter(
                self._folder(time),
                overwrite=overwrite,
                cache_staged_state_dict=cached,
                _extensions=[Inverting() for _ in range(self._options["_extensions"])],
                **options,
            )

        return cast("FileSystemWriter", self._once("writer", make))

    def _planner(self) -> DefaultSavePlanner:
        names = ("flatten_state_dict", "flatten_sharded_tensors", "dedup_replicated_tensors")
        options = {name: self._options[name] for name in (*names, "dedup_save_to_lowest_rank", "enable_plan_caching")}
        return cast("DefaultSavePlanner", self._once("planner", partial(self._planner_class, **options)))

    def _stager(self) -> AsyncStager | None:
        def make() -> AsyncStager | None:
            stager = STAGERS[self._options["stager"]]()
            if stager is not None:
                self._kept.setdefault("stagers", []).append(stager)
            return stager

        return cast("AsyncStager | None", self._once("stager", make))

    def _once(self, what: str, make: Callable[[], Any]) -> Any:
        """Return a new object for each save, or the first one if the options keep it."""
        if self._options[what] != "kept" and self._options.get(f"{what}s") != "kept":
            return make()
        if what not in self._kept:
            self._kept[what] = make()
        return self._kept[what]

    def _loaded(self, time: int) -> dict[str, str]:
        """Load a checkpoint into other values; returns the differences from those at its call."""
        options = self._options
        layouts = {"the same layouts": _LAYOUTS, "other layouts": _OTHER}.get(options["into"], {})
        target = spoiled(state_of(time, self._mesh, layouts, **self._kind))
        if self._is_nested:
            target["counter"] = Counter(-1)
        if options["allow_partial_load"]:
            (target["model"] if self._is_nested else target)[_ABSENT] = torch.full((3,), 7.0)
        target = self._read(target, time)
        expected = dict(leaves(state_of(time, None, {}, **self._kind)))
        measured = dict(leaves(target))
        if options["allow_partial_load"]:
            expected |= {f"{'model.' * self._is_nested}{_ABSENT}": torch.full((3,), 7.0)}
        if measured.keys() != expected.keys():
            return {"keys": f"time {time}: {sorted(measured)}, expected {sorted(expected)}"}
        differences = {path: fault(measured[path], expected[path]) for path in expected}
        return next(({"values": f"{path}, time {time}: {text}"} for path, text in differences.items() if text), {})

    def _read(self, target: dict[str, Any], time: int) -> dict[str, Any]:
        options, group, folder = self._options, self._groups.world(self._trial), self._folder(time)
        names = ("flatten_state_dict", "flatten_sharded_tensors", "allow_partial_load")
        planner = DefaultLoadPlanner(**{name: options[name] for name in names})
        match options["loaded by"]:
            case "load" if options["writer"] in _FOUND:
                load(target, checkpoint_id=self._id(time), planner=planner, process_group=group)
            case "load":
                load(target, storage_reader=FileSystemReader(folder, registry()), planner=planner, process_group=group)
            case "load_state_dict":
                target = plain_dicts(target)
                load_state_dict(
                    target, FileSystemReader(folder, registry()), group, options["coordinator_rank"], planner=planner
                )
            case "each rank alone":
                load(target, checkpoint_id=self._id(time), planner=planner, no_dist=True)
            case _:
                if dist.get_rank() == 0:
                    dcp_to_torch_save(folder, folder / "torch.pt")
                dist.barrier(group)
                return cast("dict[str, Any]", torch.load(folder / "torch.pt", weights_only=False))
        return target


@experiment(needs=Needs.SHARDING)
def sweep(rank: RankWorld) -> Swept:
    """Save and load with every three values of different options; two ranks with some rows alone."""
    groups, mesh = Groups(), DeviceMesh(rank.device.type, [*range(rank.size)])

    def faults(options: Options, directory: Path, trial: DeviceMesh) -> dict[str, str]:
        return Case(options, directory, groups, mesh, trial).faults()

    known = {"rules": RULES, "suspects": SUSPECTS, "refusals": REFUSALS}
    return sweep_rows(rank, fsdp_mesh(rank.mesh), faults, options=AXES, label="checkpoints", **known)
