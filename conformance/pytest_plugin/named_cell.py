"""`--cells ID` for a cell outside of the profile, such as the result of shrinking."""

from conformance.plan.cells import cell_from_id
from conformance.plan.matrix import TRAINER_CELLS, Case, Matrix, is_trainer_cell
from conformance.plan.mesh import AxisError
from reference_trainer.checks import UsageError

_TRAINER_IDS = f": {', '.join(cell.id for cell in TRAINER_CELLS)}"


def cases_of(cell_id: str, matrix: Matrix, *, seed: int = 0, trainer: str | None = None) -> tuple[Case, ...]:
    """Return the cases of all laws on the cell with this id, whose seed is increased by `seed`; none for no id.

    Raises UsageError for a cell that a rule of the matrix excludes, or that another trainer cannot be asked for.
    """
    try:
        cell = cell_from_id(cell_id.strip())
    except AxisError:
        return ()
    rule = matrix.content.exclusion_of(cell)
    if rule is not None:
        raise UsageError(f"--cells {cell_id}: cells with {rule.when} cannot be: {rule.reason}")
    if trainer is not None and not is_trainer_cell(cell):
        raise UsageError(f"--cells {cell_id}: other trainers have the options of these cells alone{_TRAINER_IDS}")
    return tuple(case.on(cell.but(seed=cell.seed + seed)) for case in matrix.cases_on(cell, trainer=trainer))
