"""Expected durations of cells: a model by which cells without a measurement are chosen and ordered.

Bases of meshes and factors are rounded coefficients of a least-squares fit to the logarithms of 318 measured durations,
of cells with many features that are not compiled (standard deviation of the residuals: 0.15). The times of compilation,
of three mesh dimensions, of one rank, and of eight ranks without replicas are rough figures from a few cells or none.
"""

from conformance.plan.cells import Cell, is_compiled_by_inductor
from conformance.plan.mesh import Mesh

COST_AXES = frozenset(
    {
        "mesh",
        "precision",
        "init",
        "model",
        "optimizer",
        "clip",
        "foreach_clip",
        "accumulation",
        "activation_checkpointing",
        "compile",
        "dropout",
        "saved_on",
        "saving",
        "steps",
    }
)
"""Axes on which `estimated_s` depends."""
_WORLD_S = {1: 0.4, 2: 0.75, 3: 1.2, 4: 1.35, 6: 1.7, 8: 2.0}
"""Duration of a run of three steps and of its verdicts, with shards alone, by ranks, on two processors."""
_LARGEST_WORLD = 8
_SIMULATED_S = 3.0
"""Rough duration of a cell that is only simulated, in one process."""


def estimated_s(cell: Cell) -> float:
    """Return the expected duration of a cell's runs and verdicts in seconds, on two processors."""
    mesh = Mesh.parse(cell.mesh)
    if mesh.world_size > _LARGEST_WORLD:
        return _SIMULATED_S
    seconds = _mesh_s(mesh) * (0.5 + 0.5 * cell.steps / 3) + _sharding_propagation_s(cell, mesh)
    seconds *= 1.0 + 0.2 * (cell.accumulation - 1)
    seconds *= 1.0 if cell.precision == "fp32" else 1.15
    seconds *= 1.0 if cell.activation_checkpointing == "none" else 1.15
    seconds += _compilation_s(cell, mesh)
    if cell.init == "checkpoint":
        seconds += 0.2
    if cell.saved_on != "none":  # a run that saves comes first, and one that was not interrupted is compared
        seconds *= 3.0 if cell.compile else 2.0
        seconds *= 1.15 if cell.saving == "async" else 1.0
    if cell.model in ("deep", "wide"):
        seconds *= 2.5
    return round(seconds, 2)


def _mesh_s(mesh: Mesh) -> float:
    world_s = next(run_s for ranks, run_s in _WORLD_S.items() if mesh.world_size <= ranks)
    world_s *= 1.6 if mesh.pp > 1 else 1.0  # twice as many layers; a rough figure
    return world_s * (1.9 if mesh.tp > 1 else 1.0) * (1.4 if mesh.dp_replicate > 1 else 1.0)


def _sharding_propagation_s(cell: Cell, mesh: Mesh) -> float:
    """Return the time that DTensor needs on three dimensions to find out how operators are sharded.

    Every rank tries all combinations of placements, once for each operator and shape, and for each tensor of a list.
    """
    if mesh.tp == 1 or mesh.dp_replicate == 1:
        return 0.0
    clipping_s = 0.0 if cell.clip == 0.0 else 3.0 if cell.foreach_clip else 1.0
    optimizer_s = 0.5 if cell.optimizer == "adamw-fused" else 3.0
    return clipping_s + optimizer_s


def _compilation_s(cell: Cell, mesh: Mesh) -> float:
    """Return the time of compilation, in which all ranks do the same; most meshes are only traced."""
    if not cell.compile:
        return 0.0
    if is_compiled_by_inductor(mesh):
        return 14.0
    return 1.3 * mesh.world_size * (1.4 if mesh.tp > 1 else 1.0)


def worth_s(cell: Cell) -> float:
    """Return the cost by which combinations are chosen: the duration, doubled where fewer laws judge the numbers.

    Without an oracle for dropout's masks, and for bf16 master weights, such values are combined no more often than
    they must be.
    """
    unknown = (cell.dropout > 0.0) + (cell.precision == "bf16-mixed")
    return estimated_s(cell) * 2.0**unknown
