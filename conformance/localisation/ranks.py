"""Ranks of a run by their places in the mesh, and the clauses that name some of them."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.plan.mesh import Mesh
from conformance.report.location import Location
from conformance.run.record import Record

_DATA = ("dp_replicate", "dp_shard", "dp", "replicate", "shard")


@dataclass(frozen=True)
class Ranks:
    """Ranks of a run: coordinates by mesh dimension, and the index of each among those with different data."""

    coordinates: Sequence[Mapping[str, int]]
    data_ranks: Sequence[int]

    @property
    def all(self) -> range:
        """Numbers of all ranks."""
        return range(len(self.coordinates))

    def peers(self, rank: int) -> list[int]:
        """Return the ranks that compute with the same data and the same stage, that is, the tensor-parallel group."""
        return [other for other in self.all if self._group(other) == self._group(rank)]

    def _group(self, rank: int) -> tuple[int, int]:
        return self.data_ranks[rank], self.coordinates[rank].get("pp", 0)

    def group(self, rank: int, dimension: str) -> list[int]:
        """Return the ranks of a rank's group along a mesh dimension, in order; all ranks for `world`, else none."""
        if dimension == "world":
            return [*self.all]
        own = self.coordinates[rank]
        if dimension not in own:
            return []
        others = [name for name in own if name != dimension]
        members = [each for each in self.all if all(self.coordinates[each][name] == own[name] for name in others)]
        return sorted(members, key=lambda each: self.coordinates[each][dimension])

    def size(self, dimension: str) -> int:
        """Return the number of ranks along a dimension of the mesh; 1 if the mesh lacks it."""
        return 1 + max(coordinate.get(dimension, 0) for coordinate in self.coordinates)

    def text(self, ranks: Sequence[int]) -> str:
        """Return ranks by their places: `all ranks`, `tp rank 1 of 2`, `rank 1 of 4`."""
        if set(ranks) == set(self.all):
            return "all ranks" if len(self.coordinates) > 1 else "the only rank"
        for name in self.coordinates[0]:
            indices = {self.coordinates[rank][name] for rank in ranks}
            if set(ranks) == {rank for rank in self.all if self.coordinates[rank][name] in indices}:
                return _numbered(f"{name} rank", sorted(indices), self.size(name))
        return _numbered("rank", sorted(ranks), len(self.coordinates))

    def location(self, ranks: Sequence[int], **facts: Any) -> Location:
        """Return the location of these facts on some ranks; its case and cell are still to be named."""
        return Location(case="", cell="", ranks=[*ranks], ranks_text=self.text(ranks), **facts)

    def sharding_dimensions(self) -> list[str]:
        """Return the dimensions of several ranks that hold different parts of the parameters."""
        return [name for name in self.coordinates[0] if self.size(name) > 1 and "replicate" not in name]

    def reduction_dimensions(self) -> str:
        """Return the names of the dimensions over which gradients are reduced, joined by `x`."""
        names = [name for name in self.coordinates[0] if name in _DATA and self.size(name) > 1]
        return " x ".join(names) or "no dimension"


def _numbered(noun: str, numbers: Sequence[int], size: int) -> str:
    plural = "s" if len(numbers) > 1 else ""
    return f"{noun}{plural} {', '.join(map(str, numbers))} of {size}"


def ranks_of_mesh(mesh: Mesh) -> Ranks:
    """Return the ranks of a mesh, whose last dimension is that of neighbours; each counts as one with its own data."""
    sizes = {"pp": mesh.pp, "dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard, "tp": mesh.tp}
    shape = {name: size for name, size in sizes.items() if size > 1}
    coordinates = [dict(zip(shape, at, strict=True)) for at in itertools.product(*map(range, shape.values()))]
    return Ranks(coordinates, [*range(mesh.world_size)])


def ranks_of(record: Record) -> Ranks:
    """Return the ranks of a run of the reference trainer."""
    coordinates = [facts.mesh_coordinate for facts in record.ranks]
    shards = 1 + max(coordinate.get("dp_shard", 0) for coordinate in coordinates)
    data_ranks = [c.get("dp_replicate", 0) * shards + c.get("dp_shard", 0) for c in coordinates]
    return Ranks(coordinates, data_ranks)
