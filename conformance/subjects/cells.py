"""Cells as trainers see them: the options of a run, and the model and data of its reference."""

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec.structs import replace

from conformance.plan.cells import Cell
from conformance.plan.matrix import TRAINER_CELLS
from conformance.plan.mesh import Mesh

MeshName = Literal["dp2", "hsdp2x2", "dp2-tp2"]
Precision = Literal["fp32", "bf16"]
DeviceType = Literal["cpu", "sim", "cuda"]
MESHES: Mapping[MeshName, Mapping[str, int]] = {
    "dp2": {"dp_shard": 2},
    "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
    "dp2-tp2": {"dp_shard": 2, "tp": 2},
}
"""Ranks by dimension of each mesh, the outermost first."""


class Workload(msgspec.Struct, frozen=True):
    """Model and data of a run: all options on which its reference depends."""

    tied: bool
    """True if the model ties its embedding and its head."""

    data_ranks: int
    accumulation: tuple[int, ...]
    """Micro-batches of each step, on each data-parallel rank."""
    uneven: bool
    """True if ranks with odd numbers have half of the samples."""


class SubjectCell(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one run of a trainer."""

    mesh: MeshName = "dp2"
    precision: Precision = "fp32"
    init: Literal["full", "meta"] = "full"
    """`meta`: the model is made on the meta device, and initialised when it is sharded."""
    accumulation: tuple[int, ...] = (1, 1, 1)
    """Micro-batches of each step. A step of one micro-batch between others is a plain step after an accumulated one."""
    uneven: bool = False
    tied: bool = False
    offload: bool = False
    """True if parameters are offloaded to the host, into pinned memory if there is an accelerator."""
    resumed: bool = False
    """True if the run is saved after its first training step, built again, and loaded."""
    turns: int = 1
    """Steps of the run that are one training step, see `conformance.subjects.turns`."""
    device: DeviceType = "cpu"
    """Type of the device on which ranks compute: the processors, the simulated accelerator, or CUDA devices."""

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
    def saved_after(self) -> int:
        """Number of steps before a run that is resumed is saved: those of one training step.

        The optimizer, or each of those that take turns, has a state then.
        """
        return self.turns

    @property
    def workload(self) -> Workload:
        """Model and data."""
        return Workload(self.tied, self.data_ranks, self.accumulation, self.uneven)


Accumulation = Literal["any", "even", "remainder", "none"]
"""Micro-batches that a loop can accumulate.

Other numbers in each step, the same in all steps, the same but for fewer in the last step, or one alone.
"""


def subject_cell(
    cell: Cell, *, device: DeviceType = "cpu", accumulation: Accumulation = "any", turns: int = 1
) -> SubjectCell:
    """Return the options that a trainer has on a cell of the profile `trainers`, on a type of device.

    A training step has `turns`, which are steps of the run.
    """
    counts: list[int] = [cell.accumulation] * cell.steps
    if accumulation == "any":
        counts[1::2] = [1] * len(counts[1::2])
    elif accumulation == "remainder":
        counts[-1] = max(counts[-1] - 1, 1)
    return SubjectCell(
        mesh=cell.mesh,  # type: ignore[arg-type]
        precision="fp32" if cell.precision == "fp32" else "bf16",
        init=cell.init,  # type: ignore[arg-type]
        accumulation=tuple(count for count in counts for _ in range(turns)),
        uneven=cell.batches == "uneven",
        tied=cell.tied_embeddings,
        offload=cell.offload == "cpu",
        resumed=cell.saved_on == "same",
        device=device,
        turns=turns,
    )


def reference_cell(cell: Cell) -> Cell:
    """Return the cell with the same model and data whose reference a cell is compared with: one for many cells.

    It is in bf16, beside fp32, if a cell of the profile that is compared with it is.
    """
    data = _workload_cell(cell)
    in_bf16 = any(each.precision != "fp32" and _workload_cell(each) == data for each in (cell, *TRAINER_CELLS))
    return replace(data, precision="bf16-mp") if in_bf16 else data


def _workload_cell(cell: Cell) -> Cell:
    mesh = Mesh.parse(cell.mesh)
    return Cell(
        mesh=f"dp{mesh.dp_replicate * mesh.dp_shard}",
        init="full",
        accumulation=cell.accumulation,
        tied_embeddings=cell.tied_embeddings,
        batches=cell.batches,
    )
