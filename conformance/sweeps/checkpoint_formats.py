"""Checkpoints in the formats of other programs: safetensors files of Hugging Face, and files of `torch.save`."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
    torch_save_to_dcp,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from conformance.experiments.context import RankWorld, experiment
from conformance.instruments.sharding import local
from conformance.run.experiment import Needs
from conformance.sweeps.checkpoints import Groups, fault, finish, numbers, placed, sweep_rows
from conformance.sweeps.covering_sweep import Options, forbids, needs
from conformance.sweeps.layouts import Layout
from conformance.sweeps.trials import Swept
from reference_trainer.mesh import fsdp_mesh

TIMES = 2
AXES: Mapping[str, tuple[Any, ...]] = {
    "format": (
        *("safetensors", "safetensors of two files", "safetensors of others", "torch.save", "from torch.save"),
        "broadcast",
    ),
    "reader gets": ("its path at once", "another path later"),
    "saved by": ("save", "async_save"),
    "save_distributed": (True, False),
    "enable_consolidation": (False, True),
    "thread_count": (1, 2),
    "thread_count_consolidation": (1, 2),
    "reader's thread_count": (1, 2),
    "saved as": ("rows", "columns", "replicas", "plain"),
    "loaded as": ("rows", "columns", "replicas", "plain"),
    "state": ("flat", "nested"),
    "tensors": ("several", "one", "with a number"),
    "flatten_state_dict": (True, False),
}
"""Values of each option; the first is the default."""
_SAFETENSORS = ("safetensors", "safetensors of two files")
_READ_AS_SAFETENSORS = (*_SAFETENSORS, "safetensors of others")
RULES = (
    *needs(
        AXES,
        ("saved by", "format", *_SAFETENSORS),
        ("save_distributed", "format", *_SAFETENSORS),
        ("enable_consolidation", "format", *_SAFETENSORS),
        ("thread_count", "format", *_SAFETENSORS),
        ("thread_count_consolidation", "format", *_SAFETENSORS),
        ("reader's thread_count", "format", *_READ_AS_SAFETENSORS),
        ("state", "format", *(kind for kind in AXES["format"] if kind not in _READ_AS_SAFETENSORS)),
        ("reader gets", "format", "broadcast"),
        ("flatten_state_dict", "format", "broadcast"),
        ("flatten_state_dict", "state", "flat"),
        ("enable_consolidation", "save_distributed", True),
        ("thread_count_consolidation", "enable_consolidation", True),
        # Rank 0 alone saves full tensors.
        ("save_distributed", "saved as", "plain"),
    ),
    # findings/broadcast_reader_waits_for_dtensors.py
    forbids("format", "loaded as", when=lambda kind, layout: kind == "broadcast" and layout != "plain"),
)
SUSPECTS: tuple[Options, ...] = (
    # findings/consolidated_numbers_are_zero.py
    {"enable_consolidation": True, "tensors": "with a number"},
    # findings/async_save_of_sharded_numbers.py
    {"saved by": "async_save", "tensors": "with a number"},
)
"""Options that torch gets wrong: tried first, since narrowing a row down takes long."""
_LAYOUTS: Mapping[str, Layout | None] = {
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "replicas": (Replicate(),),
    "plain": None,
}
_SHAPES = {
    "even": (8, 4),
    "uneven": (5, 7),
    "few": (1, 3),
    "vector": (6,),
    "long": (70, 40),
    "images": (6, 4, 3),
    "volumes": (2, 4, 3, 2),
}
_DTYPES = {"vector": torch.bfloat16, "few": torch.float64}


def full_tensors(time: int) -> dict[str, Tensor]:
    """Return the full tensors of a time."""
    return {
        name: numbers(shape, 20 * time + index, _DTYPES.get(name, torch.float32))
        for index, (name, shape) in enumerate(_SHAPES.items())
    }


class Case:
    """Row of options in a directory."""

    def __init__(self, options: Options, directory: Path, mesh: DeviceMesh, group: Any) -> None:
        self._options, self._directory, self._mesh, self._group = options, directory, mesh, group

    def faults(self) -> dict[str, str]:
        """Save twice, changing all tensors in place, and load both checkpoints; returns the differences."""
        for time in range(TIMES):
            self._save(time)
        found: dict[str, str] = {}
        for time in range(TIMES):  # to the end on every rank: loading is collective
            loaded = self._load(time)
            for name, full in self._full(time).items():
                if text := fault(loaded[name], full):
                    found.setdefault("values", f"{name}, time {time}: {text}")
        return found

    def _folder(self, time: int) -> Path:
        return self._directory / f"{time}"

    def _state(self, time: int, layout: str) -> dict[str, Tensor]:
        at = _LAYOUTS[layout]
        mesh = self._mesh if at else None
        return {name: placed(full, mesh, at or ()) for name, full in self._full(time).items()}

    def _full(self, time: int) -> dict[str, Tensor]:
        """Return the full tensors of a time: some ranks have nothing to write of one alone."""
        tensors = full_tensors(time)
        if self._options["tensors"] == "one":
            return {"even": tensors["even"]}
        return tensors | ({"number": torch.tensor(time + 0.5)} if self._options["tensors"] == "with a number" else {})

    def _nested(self, state: dict[str, Tensor]) -> dict[str, Any]:
        return {"model": state} if self._options["state"] == "nested" else dict(state)

    def _save(self, time: int) -> None:
        state, kind = self._state(time, self._options["saved as"]), self._options["format"]
        if kind in _SAFETENSORS:
            self._save_safetensors(state, time)
        elif kind == "torch.save":
            save(self._nested(state), checkpoint_id=self._folder(time), process_group=self._group)
            if dist.get_rank() == 0:
                dcp_to_torch_save(self._folder(time), self._folder(time) / "state.pt")
        elif kind == "safetensors of others":
            self._save_as_others(time)
        elif dist.get_rank() == 0:
            self._folder(time).mkdir(parents=True)
            torch.save(self._nested(self._full(time)), self._folder(time) / "state.pt")
            if kind == "from torch.save":
                torch_save_to_dcp(self._folder(time) / "state.pt", self._folder(time))
        dist.barrier(self._group)

    def _save_as_others(self, time: int) -> None:
        """Save full tensors as programs do that know nothing of shards."""
        if dist.get_rank() == 0:
            self._folder(time).mkdir(parents=True)
            file = importlib.import_module("safetensors.torch")
            file.save_file(self._full(time), self._folder(time) / "model.safetensors")

    def _save_safetensors(self, state: dict[str, Tensor], time: int) -> None:
        names = ("save_distributed", "enable_consolidation", "thread_count", "thread_count_consolidation")
        files = {name: 1 + index % 2 for index, name in enumerate(state)}
        is_split = self._options["format"] == "safetensors of two files"
        writer = _hf_storage().HuggingFaceStorageWriter(
            str(self._folder(time)),
            fqn_to_index_mapping=files if is_split else None,
            **{name: self._options[name] for name in names},
        )
        if not self._options["save_distributed"]:
            if dist.get_rank() == 0:
                function = async_save if self._options["saved by"] == "async_save" else save
                finish(function(dict(state), storage_writer=writer, no_dist=True))
            return
        if self._options["saved by"] == "save":
            save(dict(state), storage_writer=writer, process_group=self._group)
            return
        started = async_save(dict(state), storage_writer=writer, process_group=self._group)
        for tensor in state.values():
            local(tensor).add_(1)
        finish(started)

    def _load(self, time: int) -> dict[str, Tensor]:
        state = self._state(TIMES, self._options["loaded as"])
        file = self._folder(time) / "state.pt"
        nested = self._nested(state)
        match self._options["format"]:
            case "torch.save":
                nested = torch.load(file)
            case "from torch.save":
                load(nested, checkpoint_id=self._folder(time), process_group=self._group)
            case "broadcast":
                self._broadcast(nested, file)
            case _:
                threads = self._options["reader's thread_count"]
                reader_of_files = _hf_storage().HuggingFaceStorageReader(str(self._folder(time)), thread_count=threads)
                load(nested, storage_reader=reader_of_files, process_group=self._group)
        return cast("dict[str, Tensor]", nested["model"] if self._options["state"] == "nested" else nested)

    def _broadcast(self, state: dict[str, Any], file: Path) -> None:
        """Load a file that rank 0 reads; raises ValueError if the reader takes a folder for such a file."""
        is_reset = self._options["reader gets"] == "another path later"
        reader = BroadcastingTorchSaveReader(file.with_name("none.pt") if is_reset else file)
        if not reader.validate_checkpoint_id(file) or reader.validate_checkpoint_id(file.parent):
            raise ValueError(f"{file}: a reader of such files takes no file, or a folder")
        later = {"checkpoint_id": file} if is_reset else {}
        planner = DynamicMetaLoadPlanner(flatten_state_dict=self._options["flatten_state_dict"])
        load(state, storage_reader=reader, planner=planner, process_group=self._group, **later)


def _hf_storage() -> ModuleType:
    """Return the module of safetensors files, which torch 2.7 lacks: CKPT-8 leaves that torch out."""
    return importlib.import_module("torch.distributed.checkpoint.hf_storage")


@experiment(needs=Needs.SHARDING)
def sweep(rank: RankWorld) -> Swept:
    """Save and load with every two values of different options; two ranks with some rows alone."""
    groups, mesh = Groups(), DeviceMesh(rank.device.type, [*range(rank.size)])

    def faults(options: Options, directory: Path, trial: DeviceMesh) -> dict[str, str]:
        return Case(options, directory, mesh, groups.world(trial)).faults()

    known: dict[str, Any] = {"rules": RULES, "suspects": SUSPECTS, "refusals": (), "more": _kinds}
    return sweep_rows(rank, fsdp_mesh(rank.mesh), faults, options=AXES, label="files", **known)


def _kinds(row: Options) -> Iterator[str]:
    """Yield the kinds of a row of which there must be one where not all rows are tried."""
    if row["save_distributed"] and row["format"] in _SAFETENSORS:
        yield f"{row['saved as']}, consolidated: {row['enable_consolidation']}"
        yield f"{row['tensors']}, replicas: {row['saved as'] == 'replicas'}"
