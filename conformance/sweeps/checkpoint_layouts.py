"""Checkpoints of tensors in each layout, loaded in each other one, on more, fewer and other ranks, or as plain ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from conformance.experiments.context import RankWorld, experiment
from conformance.run.experiment import Needs
from conformance.sweeps.checkpoints import Groups, fault, numbers, placed, plain_errors
from conformance.sweeps.layouts import Layout, is_member, strided_rows
from conformance.sweeps.trials import Swept, Trials
from reference_trainer.mesh import fsdp_mesh

SHAPES: Mapping[str, tuple[int, ...]] = {
    "even": (8, 8),
    "uneven": (5, 7),
    "more ranks than rows": (1, 3),
    "three dimensions": (3, 2, 5),
    "vector": (6,),
    "number": (),
    "nothing": (0, 4),
}
"""Shapes of the tensors of a checkpoint."""
_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
_MESHES: Mapping[int, Mapping[str, list[int] | list[list[int]]]] = {
    2: {"rank 0": [0], "rank 1": [1], "2 ranks": [0, 1], "1 x 2": [[0, 1]], "2 x 1": [[0], [1]]},
    4: {
        "rank 3": [3],
        "2 ranks": [0, 1],
        "3 ranks": [1, 2, 3],
        "4 ranks": [0, 1, 2, 3],
        "2 x 2": [[0, 1], [2, 3]],
        "2 x 1": [[1], [3]],
        "1 x 4": [[0, 1, 2, 3]],
    },
}
"""Ranks of the meshes, by the number of all ranks."""
_ON_ONE_DIMENSION: Mapping[str, Layout] = {"rows": (Shard(0),), "columns": (Shard(1),), "replicas": (Replicate(),)}
_ON_TWO: Mapping[str, Layout] = {
    "HSDP": (Replicate(), Shard(0)),
    "HSDP of columns": (Replicate(), Shard(1)),
    "FSDP and columns": (Shard(0), Shard(1)),
    "columns and rows": (Shard(1), Shard(0)),
    "rows of rows": (Shard(0), Shard(0)),
    "rows of replicas": (Shard(0), Replicate()),
}
LOADS: Mapping[int, int] = {2: 3, 4: 8}
"""Number of places in which each checkpoint is loaded, by the number of ranks; the seed of the cell draws them."""
TIMES = 2
"""Number of times that a checkpoint is saved, and loaded into the same tensors."""


@dataclass(frozen=True)
class Place:
    """Mesh and layout of all tensors of a state; plain tensors without a mesh."""

    name: str
    mesh: DeviceMesh | None = None
    layout: tuple[Placement, ...] = ()

    @property
    def ranks(self) -> list[int]:
        """Ranks that hold anything."""
        return [*range(dist.get_world_size())] if self.mesh is None else self.mesh.mesh.flatten().tolist()

    def state(self, time: int) -> dict[str, Tensor]:
        """Return the state of a time on this place."""
        return {name: placed(full, self.mesh, self.layout) for name, full in full_state(time).items()}


def full_state(time: int) -> dict[str, Tensor]:
    """Return the full tensors of a time."""
    return {
        name: numbers(shape, seed=100 * time + index, dtype=_DTYPES[index % len(_DTYPES)])
        for index, (name, shape) in enumerate(SHAPES.items())
    }


def places_of(world_size: int, device_type: str) -> list[Place]:
    """Return every layout on every mesh of a world. A collective."""
    places = [Place("plain")]
    for name, ranks in _MESHES[world_size].items():
        mesh = DeviceMesh(device_type, ranks, mesh_dim_names=("dp", "tp")[: 1 + isinstance(ranks[0], list)])
        layouts = _ON_ONE_DIMENSION if mesh.ndim == 1 else _ON_TWO
        places += [Place(f"{layout} on {name}", mesh, layouts[layout]) for layout in layouts]
        if mesh.ndim > 1 and mesh.size() == world_size:
            places.append(Place(f"FSDP of rows on {name}", mesh, strided_rows(mesh)))
    return places


@experiment(needs=Needs.SHARDING)
def sweep(rank: RankWorld) -> Swept:
    """Save in every layout, and load each checkpoint in some."""
    places, random = places_of(rank.size, rank.device.type), Random(rank.config.seed)
    shelf = Shelf(rank.directory)
    trials = Trials(fsdp_mesh(rank.mesh))
    for source in places:
        if rank.subjects and source.name not in rank.subjects:
            continue
        end = trials.attempt(source.name, "saving", source.name, partial(shelf.save, source), may_refuse=False)
        if end is not None:
            for target in random.sample(places, LOADS[rank.size]):
                load = partial(shelf.load, source, target)
                trials.attempt(source.name, f"loading {target.name}", "2 times", load, may_refuse=False)
    return trials.swept


@dataclass
class Shelf:
    """Directory with a checkpoint of each place and time."""

    directory: Path
    groups: Groups = field(default_factory=Groups)

    @plain_errors()
    def save(self, source: Place, mesh: DeviceMesh) -> dict[str, str]:
        """Save on the ranks of a mesh alone, then the next time on all ranks, of which some hold nothing."""
        own, world = self.groups.of(mesh, source.ranks), self.groups.world(mesh)
        for time in range(TIMES):
            if time or source.mesh is None:
                save(source.state(time), checkpoint_id=self._folder(source, time), process_group=world)
            elif is_member(source.mesh):
                save(source.state(time), checkpoint_id=self._folder(source, time), process_group=own)
        dist.barrier(world)
        return {}

    @plain_errors()
    def load(self, source: Place, target: Place, mesh: DeviceMesh) -> dict[str, str]:
        """Load the checkpoints of all times, one after the other, into the same tensors; returns the differences."""
        world = self.groups.world(mesh)
        state = target.state(TIMES)
        found: dict[str, str] = {}
        for time in range(TIMES):  # to the end on every rank: loading is collective
            load(state, checkpoint_id=self._folder(source, time), process_group=world)
            for name, full in full_state(time).items():
                if text := fault(state[name], full):
                    found.setdefault("values", f"{name}, time {time}: {text}")
        return found

    def _folder(self, source: Place, time: int) -> Path:
        return self.directory / f"{source.name} {time}"
