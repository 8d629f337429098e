"""Expected durations of cells: a rough model, by which cells that have never been timed are chosen and ordered."""

from conformance.plan.cells import Cell
from conformance.plan.mesh import Mesh

COST_AXES = frozenset(
    {"mesh", "steps", "accumulation", "saved_on", "init", "offload", "compile", "model", "dropout", "precision"}
)
"""Axes on which `estimated_s` depends."""
_RUN_S = {1: 0.3, 2: 0.4, 3: 0.7, 4: 1.1, 6: 1.8, 8: 3.0}
"""Rough duration of a warm run of three steps without tensor parallelism, by ranks, on two processors."""

_LARGEST_WORLD = 8
_SIMULATED_S = 3.0
"""Rough duration of a cell that is only simulated, in one process."""


def estimated_s(cell: Cell) -> float:
    """Return the expected duration of a cell's runs and verdicts in seconds, on two processors.

    A resumed run is preceded by one that saves, and compared with one that was not interrupted. Compilation takes far
    longer than training.
    """
    mesh = Mesh.parse(cell.mesh)
    if mesh.world_size > _LARGEST_WORLD:
        return _SIMULATED_S
    of_world = next(run_s for ranks, run_s in _RUN_S.items() if mesh.world_size <= ranks)
    seconds = of_world * (1.4 if mesh.tp > 1 else 1.0) * (0.6 + 0.4 * cell.steps / 3)
    seconds *= 1.0 + 0.3 * (cell.accumulation - 1)
    if cell.saved_on != "none":
        seconds += 2.0 + 1.2 * seconds
    if cell.init == "checkpoint":
        seconds += 0.4
    if cell.offload == "cpu":
        seconds *= 1.2
    if cell.compile:
        seconds += 9.0 * (1.5 if mesh.tp > 1 else 1.0)
    if cell.model in ("deep", "wide"):
        seconds *= 2.5
    return round(seconds, 2)


def worth_s(cell: Cell) -> float:
    """Return the cost by which combinations are chosen: the duration, times two where fewer laws judge the numbers.

    Without an oracle for dropout's masks, and for bf16 master weights, such values are combined no more often than
    they must be.
    """
    unknown = (cell.dropout > 0.0) + (cell.precision == "bf16-mixed") + (cell.saved_on != "none")
    return estimated_s(cell) * 2.0**unknown
