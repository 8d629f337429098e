"""Options of saving and loading, any three together: writers, planners, stagers and functions, three times each.

A state on all ranks is saved three times while its tensors change: in place after each save, as a training does, and
before the second save one rank has more, before the third a tensor grows and one is added, or something else changes.
Each checkpoint must hold the values of its own call.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load, load_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save, save, save_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from conformance.covering_arrays.combinations import Rule
from conformance.experiments.context import RankWorld, experiment
from conformance.instruments.sharding import local
from conformance.run.experiment import Needs
from conformance.sweeps.checkpoint_extension import Inverting, registry
from conformance.sweeps.checkpoint_objects import Counter, change_objects, objects_of
from conformance.sweeps.checkpoints import Groups, fault, finish, numbers, placed, spoiled, sweep_rows
from conformance.sweeps.covering_sweep import Options, forbids, needs
from conformance.sweeps.layouts import Layout
from conformance.sweeps.trials import Swept
from reference_trainer.mesh import fsdp_mesh

TIMES = 3
AXES: Mapping[str, tuple[Any, ...]] = {
    "saved by": ("save", "save by position", "async_save", "save_state_dict"),
    "state": ("nested", "flat", "tensors"),
    "objects": (False, True),
    "conjugates": (False, True),
    "change": ("growth", "another layout", "another name", "another dtype", "a tensor for a number"),
    "path": ("its own", "the same"),
    "writer": ("new", "kept", "of an old interface", "found by path", "found by URL"),
    "single_file_per_rank": (True, False),
    "sync_files": (True, False),
    "thread_count": (1, 3),
    "per_thread_copy_ahead": (10_000_000, 0),
    "_extensions": (0, 1, 2),
    "planner": ("new", "kept", "without hints"),
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
    "no_dist": (False, True),
    "coordinator_rank": (0, 1),
    "loaded by": ("load", "load by position", "load_state_dict", "each rank alone", "dcp_to_torch_save"),
    "into": ("the same layouts", "other layouts", "plain tensors", "tensors on meta"),
    "allow_partial_load": (False, True),
}
"""Values of each option; the first is the default. A test compares them with the signatures of the installed torch."""


_TOGETHER, _ALONE = ("load", "load by position", "load_state_dict"), ("each rank alone", "dcp_to_torch_save")
"""Functions with which all ranks load, and those with which one process does without the others."""


_FOR_ONE = {False: "plain tensors", True: "the same layouts"}
"""Layouts in which one rank alone loads a checkpoint of all ranks, or, if True, its own one."""
_FOUND = ("found by path", "found by URL")
"""Writers that torch chooses by the checkpoint's id: a path, or a URL for fsspec."""
_OF_WRITERS = (
    *("single_file_per_rank", "sync_files", "thread_count", "per_thread_copy_ahead", "_extensions"),
    *("cache_staged_state_dict", "path", "use_collectives", "no_dist"),
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
        ("use_collectives", "saved by", "save", "save by position", "async_save"),
        ("no_dist", "saved by", "save", "save by position", "async_save"),
        # A nested state that is not flattened is pickled, with this rank's shards.
        ("flatten_state_dict", "state", "flat", "tensors"),
        ("objects", "state", "nested", "flat"),
        # A planner that makes the plan of all ranks keeps none.
        ("enable_plan_caching", "planner", "new", "kept"),
        # Writers and planners hold the state of the save that uses them; a stager has one copy of each tensor.
        ("writer", "in flight", "one"),
        *((option, "writer", "new", "kept", "of an old interface") for option in _OF_WRITERS),
        # An old interface has no word for it.
        ("use_collectives", "writer", "new", "kept"),
        ("planner", "in flight", "one"),
        ("cache_staged_state_dict", "stager", "none"),
        ("stagers", "in flight", "one"),
        ("path", "in flight", "one"),
        # The cache of plans belongs to the process.
        ("enable_plan_caching", "in flight", "one"),
        # Without coordination each rank has its own metadata, and loads what it has saved.
        ("into", "use_collectives", True),
        ("use_collectives", "loaded by", *_TOGETHER),
        # A rank that saves alone has the shards that it loads alone.
        ("no_dist", "loaded by", "each rank alone"),
        ("no_dist", "use_collectives", True),
        # `dcp_to_torch_save` and a load by name know torch's own extensions alone.
        ("_extensions", "loaded by", *_TOGETHER),
        ("allow_partial_load", "loaded by", *_TOGETHER, "each rank alone"),
    ),
    # A rank that has its own metadata loads the shards that it has saved.
    forbids(
        *("change", "use_collectives", "no_dist"),
        when=lambda change, together, alone: change == "another layout" and (alone or not together),
    ),
    # Documented: it refuses what is neither a tensor nor a number.
    forbids("objects", "stager", when=lambda objects, stager: objects and stager == "type check"),
    # The deprecated functions, and positions, take writers alone.
    forbids(
        *("writer", "saved by"),
        when=lambda writer, api: writer in _FOUND and api in ("save by position", "save_state_dict"),
    ),
    # One process alone loads full tensors, or its own shards.
    forbids("loaded by", "into", "no_dist", when=lambda api, into, own: api in _ALONE and into != _FOR_ONE[own]),
)
_COPYING_STORAGES = ("default", "async staging", "shared memory")
"""Stagers that make copies of storages; a writer that is given makes copies of tensors, unless there is a stager."""
REFUSALS: tuple[Options, ...] = (
    # Pinned memory, which needs an accelerator.
    {"saved by": "async_save", "cache_staged_state_dict": True},
    {"saved by": "async_save", "stager": "blocking and cached"},
)
"""Options that torch refuses; any other error is a fault."""
SUSPECTS: tuple[Options, ...] = (
    *REFUSALS,
    # findings/objects_not_loaded_unflattened.py
    {"state": "flat", "flatten_state_dict": False, "flatten_sharded_tensors": True},
    # findings/async_save_of_conjugates.py
    *({"saved by": "async_save", "conjugates": True, "stager": stager} for stager in _COPYING_STORAGES),
    *({"saved by": "async_save", "conjugates": True, "stager": "none", "writer": writer} for writer in _FOUND),
    # findings/plan_cache_keeps_dtypes.py
    {"enable_plan_caching": True, "change": "another dtype", "loaded by": "dcp_to_torch_save", "into": "plain tensors"},
)
"""Options that torch refuses or gets wrong: tried first, since narrowing a row down takes long."""

_LAYOUTS: Mapping[str, Layout] = {"rows": (Shard(0),), "columns": (Shard(1),), "replicas": (Replicate(),)}
_OTHER: Mapping[str, Layout] = {"rows": (Shard(1),), "columns": (Replicate(),), "replicas": (Shard(0),)}
_DTYPES = {"rows": torch.float32, "columns": torch.bfloat16, "replicas": torch.int8}
_ADDED, _OWN, _ABSENT = "added", "of one rank", "absent"


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


def full_values(time: int, change: str = "growth") -> dict[str, Any]:
    """Return the values of the time of a save, full and by path; the last one comes after a change."""
    is_changed = time == TIMES - 1
    grows = is_changed and change == "growth"
    name = "renamed" if is_changed and change == "another name" else "plain"
    dtype = torch.float32 if is_changed and change == "another dtype" else torch.float64
    values: dict[str, Any] = {
        "rows": numbers((5, 3), 10 * time),
        "columns": numbers((7 if grows else 5, 6), 10 * time + 1, torch.bfloat16),
        "replicas": numbers((4, 4), 10 * time + 2, torch.int8),
        name: numbers((3, 2), 10 * time + 3, dtype) + 2.0**-30,  # which fp32 rounds
        "transposed": numbers((3, 4), 10 * time + 4).t(),
        "slice": numbers((6, 4), 10 * time + 5)[1:3, ::2],
        "number": torch.tensor(time + 0.5),
        "empty": torch.zeros(0, 3),
        "epoch": torch.tensor(time) if is_changed and change == "a tensor for a number" else time,
        "name": f"time {time}",
        "rate": 0.5**time,
        "nothing": None,
        "list": [time, "text", {"deep": time}],
    }
    if grows:
        values[_ADDED] = numbers((2, 2), 99)
    return values


def _conjugates_of(time: int) -> dict[str, Tensor]:
    """Return tensors that are conjugates, and negative, by a bit of theirs."""
    full = torch.complex(numbers((2, 3), 10 * time + 7), numbers((2, 3), 10 * time + 8))
    return {"conjugate": full.conj(), "imaginary": full.conj().imag}


def state_of(
    time: int, mesh: DeviceMesh | None, layouts: Mapping[str, Layout], options: Options, *, saved: bool = False
) -> dict[str, Any]:
    """Return the state of a time with tensors on a mesh, or plain ones; if nested, also an object, and tied tensors.

    As it is saved, the last rank alone has one of its values.
    """
    is_nested = options["state"] == "nested"
    values = full_values(time, options["change"])
    if options["objects"]:
        values |= objects_of(time)
    if options["conjugates"]:
        values |= _conjugates_of(time)
    is_shared = options["use_collectives"] and not options["no_dist"]
    if is_shared and time and (not saved or dist.get_rank() == dist.get_world_size() - 1):
        values[_OWN] = numbers((2, 5), 10 * time + 9)
    if options["state"] == "tensors":
        values = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    for name, layout in layouts.items():
        values[name] = placed(values[name], mesh, layout)
    if not is_nested:
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
    """Return the new state in the tensors of the old one, where their shapes, dtypes and layouts are equal."""
    if isinstance(new, Tensor):
        if not isinstance(old, Tensor) or _kind(old) != _kind(new):
            return new
        local(old).copy_(local(new))
        return old
    if isinstance(new, Mapping) and isinstance(old, Mapping):
        pairs = ((key, in_place(old.get(key), value)) for key, value in new.items())
        return OrderedDict(pairs) if isinstance(new, OrderedDict) else dict(pairs)
    if isinstance(new, list) and isinstance(old, list):
        return [in_place(*pair) for pair in zip(old, new, strict=True)]
    return new


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    layout = tensor.placements if isinstance(tensor, DTensor) else None
    return tensor.shape, tensor.dtype, layout, tensor.is_conj() or tensor.is_neg()


def on_meta(state: Any) -> Any:
    """Return a copy of a nested state with tensors on meta, of the same layouts."""
    if isinstance(state, Tensor):
        return torch.empty_like(state, device="meta")
    if isinstance(state, dict):
        return type(state)((key, on_meta(value)) for key, value in state.items())
    return [on_meta(value) for value in state] if isinstance(state, list) else state


def plain_dicts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the state of objects instead of objects, for functions that do not call them."""
    return {key: value.state_dict() if isinstance(value, Counter) else value for key, value in state.items()}


class _OldWriter(FileSystemWriter):
    """Writer that is told whether it coordinates, and nothing else."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Begin a checkpoint."""
        super().set_up_storage_writer(is_coordinator)


class _WithoutHints(DefaultSavePlanner):
    """Planner that leaves the hints of shards as they are; the first rank that has a value saves it."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans of all ranks, and the metadata of the checkpoint."""
        taken: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            items = [item for item in plan.items if item.index not in taken]
            taken |= {item.index for item in items}
            plans.append(replace(plan, items=items))
        plans, metadata = create_default_global_save_plan(plans, rewrite_index_hints=False)
        if self.flatten_state_dict:
            metadata.planner_data = {key: path for plan in plans for key, path in plan.planner_data.items()}
        self.global_plan, self.metadata = plans, metadata
        return plans, metadata


class Case:
    """Row of options, whose checkpoints are in a directory."""

    def __init__(self, options: Options, directory: Path, groups: Groups, mesh: DeviceMesh, trial: DeviceMesh) -> None:
        self._options, self._directory, self._groups = options, directory, groups
        self._mesh, self._trial = mesh, trial
        self._is_nested = options["state"] == "nested"
        # The cache of plans is the class's: rows with classes of their own cannot disturb each other.
        base = _WithoutHints if options["planner"] == "without hints" else DefaultSavePlanner
        self._planner_class = type(f"Planner of {directory.name}", (base,), {})
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
            is_laid_out_again = time == TIMES - 1 and self._options["change"] == "another layout"
            layouts = _OTHER if is_laid_out_again else _LAYOUTS
            state = in_place(state, state_of(time, self._mesh, layouts, self._options, saved=True))
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
        folder = self._directory / ("same" if self._options["path"] == "the same" else f"{time}")
        return folder / f"{dist.get_rank()}" if self._options["no_dist"] else folder

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
        if options["no_dist"]:
            call["no_dist"] = True
        if options["saved by"] == "save":
            return save(state, **call)
        if options["saved by"] == "save by position":
            return cast("Any", save)(state, call.pop("storage_writer"), **call)
        if (stager := self._stager()) is not None:
            call["async_stager"] = stager
        return async_save(state, **call)

    def _train(self, state: dict[str, Any], started: Any) -> None:
        """Change all tensors in place as soon as that is allowed, and communicate as a training does."""
        if hasattr(started, "staging_completion"):
            started.staging_completion.result()
        for stager in self._kept.get("stagers", []):
            stager.synchronize_staging()
        for _, value in leaves(state):
            if isinstance(value, Tensor):
                local(value).add_(1)
        change_objects(state)
        dist.all_reduce(torch.ones(1), group=self._groups.world(self._trial, number=TIMES))

    def _writer(self, time: int) -> FileSystemWriter:
        names = ("single_file_per_rank", "sync_files", "thread_count", "per_thread_copy_ahead")
        options = {name: self._options[name] for name in names}
        # Without coordination a slow rank takes for an old checkpoint what rank 0 has just written, see
        # findings/new_checkpoint_refused_to_slow_ranks.py.
        overwrite = self._options["path"] == "the same" or not self._options["use_collectives"]
        cached = self._options["cache_staged_state_dict"]

        def make() -> FileSystemWriter:
            make_writer = _OldWriter if self._options["writer"] == "of an old interface" else FileSystemWriter
            return make_writer(
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
        layouts = {"the same layouts": _LAYOUTS, "tensors on meta": _LAYOUTS, "other layouts": _OTHER}.get(
            options["into"], {}
        )
        target = spoiled(state_of(time, self._mesh, layouts, options))
        if options["into"] == "tensors on meta":
            target = on_meta(target)
        if self._is_nested:
            target["counter"] = Counter(-1)
        if options["allow_partial_load"]:
            (target["model"] if self._is_nested else target)[_ABSENT] = torch.full((3,), 7.0)
        target = self._read(target, time)
        expected = dict(leaves(state_of(time, None, {}, options)))
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
            case "load by position":
                reader = FileSystemReader(folder, registry())
                cast("Any", load)(target, reader, planner=planner, process_group=group)
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

    known: dict[str, Any] = {"rules": RULES, "suspects": SUSPECTS, "refusals": REFUSALS, "more": _kinds}
    return sweep_rows(rank, fsdp_mesh(rank.mesh), faults, options=AXES, label="checkpoints", **known)


def _kinds(row: Options) -> Iterator[str]:
    """Yield the kinds of a row of which there must be one where not all rows are tried."""
    if row["enable_plan_caching"]:
        yield f"cached, {row['change']}"
    if row["objects"]:
        yield f"objects, {row['saved by']}, {row['stager']}"
    if row["no_dist"] or not row["use_collectives"]:
        yield f"{row['no_dist']}, {row['saved by']}"
    if not row["flatten_state_dict"]:
        yield f"not flat, {row['state']}, {row['loaded by']}"
