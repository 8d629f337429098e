"""`--cells ID` for a cell outside of the profile, such as the result of shrinking."""

from conformance.plan.cells import cell_from_id
from conformance.plan.matrix import Case, Matrix
from conformance.plan.mesh import AxisError
from reference_trainer.checks import UsageError


def cases_of(cell_id: str, matrix: Matrix, *, seed: int = 0) -> tuple[Case, ...]:
    """Return the cases of all laws on the cell with this id, whose seed is increased by `seed`; none for no id.

    Raises UsageError for a cell that a rule of the matrix excludes.
    """
    try:
        cell = cell_from_id(cell_id.strip())
    except AxisError:
        return ()
    rule = matrix.content.exclusion_of(cell)
    if rule is not None:
        raise UsageError(f"--cells {cell_id}: cells with {rule.when} cannot be: {rule.reason}")
    seeded = cell.but(seed=cell.seed + seed)
    return tuple(Case(law, seeded) for law in matrix.laws_on(cell))
