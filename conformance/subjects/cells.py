"""Cells of subjects: the few configurations in which a subject is judged, and the data of each."""

from collections.abc import Mapping
from typing import Literal

import msgspec

MeshName = Literal["dp2", "hsdp2x2", "dp2-tp2"]
Precision = Literal["fp32", "bf16"]

MESHES: Mapping[MeshName, Mapping[str, int]] = {
    "dp2": {"dp_shard": 2},
    "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
    "dp2-tp2": {"dp_shard": 2, "tp": 2},
}
"""Ranks by dimension of each mesh, the outermost first."""
_ONE_EACH, _ACCUMULATED = (1, 1, 1), (2, 1, 2)


class Workload(msgspec.Struct, frozen=True):
    """Model and data of a run: what a reference must know of a cell, and no more."""

    tied: bool
    """True if the model ties its embedding and its head."""

    data_ranks: int
    accumulation: tuple[int, ...]
    """Micro-batches of each step, on each data-parallel rank."""
    uneven: bool
    """True if ranks with odd numbers have half of the samples."""


class SubjectCell(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration in which a subject is run."""

    mesh: MeshName = "dp2"
    precision: Precision = "fp32"
    init: Literal["full", "meta"] = "full"
    """`meta`: the model is made on the meta device, and initialised when it is sharded."""
    accumulation: tuple[int, ...] = _ONE_EACH
    """Micro-batches of each step. A step of one micro-batch between others is a plain step after an accumulated one."""
    uneven: bool = False
    tied: bool = False
    offload: bool = False
    """True if parameters are offloaded to the host, without pinned memory."""
    resumed: bool = False
    """True if the run is saved after its first step, built anew, and loaded."""

    @property
    def id(self) -> str:
        """Name, such as `dp2-fp32-accumulated-uneven`."""
        tags = {
            "meta": self.init == "meta",
            "accumulated": max(self.accumulation) > 1,
            "uneven": self.uneven,
            "tied": self.tied,
            "offload": self.offload,
            "resumed": self.resumed,
        }
        return "-".join([self.mesh, self.precision, *(tag for tag, is_on in tags.items() if is_on)])

    def name_for(self, subject: str) -> str:
        """Return the name in reports, such as `fabric/dp2-fp32`, so that those of several subjects fit together."""
        return f"{subject}/{self.id}"

    @property
    def shape(self) -> Mapping[str, int]:
        """Ranks by dimension of the mesh."""
        return MESHES[self.mesh]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.data_ranks * self.shape.get("tp", 1)

    @property
    def data_ranks(self) -> int:
        """Number of ranks that see different data."""
        return self.shape.get("dp_replicate", 1) * self.shape["dp_shard"]

    @property
    def workload(self) -> Workload:
        """Model and data."""
        return Workload(self.tied, self.data_ranks, self.accumulation, self.uneven)


CELLS = (
    SubjectCell(),
    SubjectCell(accumulation=_ACCUMULATED),
    SubjectCell(accumulation=_ACCUMULATED, uneven=True),
    SubjectCell(init="meta"),
    SubjectCell(tied=True),
    SubjectCell(init="meta", tied=True),
    SubjectCell(resumed=True),
    SubjectCell(precision="bf16"),
    SubjectCell(precision="bf16", accumulation=_ACCUMULATED, offload=True),
    SubjectCell(mesh="hsdp2x2"),
    SubjectCell(mesh="hsdp2x2", accumulation=_ACCUMULATED, uneven=True),
    SubjectCell(mesh="dp2-tp2"),
    SubjectCell(mesh="dp2-tp2", accumulation=_ACCUMULATED, uneven=True),
    SubjectCell(mesh="dp2-tp2", resumed=True),
    SubjectCell(mesh="dp2-tp2", precision="bf16"),
)
"""All cells, in the order in which they are run."""
FIRST_OF_MESHES = tuple(SubjectCell(mesh=mesh) for mesh in MESHES)
"""Cell of each mesh on which it is tested whether the laws see faults."""


def split_name(name: str) -> tuple[str, str]:
    """Return subject and id of a cell's name in a report; no subject for an id alone."""
    subject, _, cell_id = name.rpartition("/")
    return subject, cell_id
