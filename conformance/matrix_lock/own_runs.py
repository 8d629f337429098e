"""Cells of which a law needs a further run that shows no new fault: profiles with `own_runs: new` leave the law out."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from conformance.defects.catalogue import defects
from conformance.plan.cells import Cell
from conformance.plan.content import compiled, read_content
from conformance.plan.lock import PlannedCell
from conformance.plan.matrix import Matrix
from conformance.plan.scopes import declared_scopes
from conformance.project import LAWS_DIRECTORY
from reference_trainer.strict_yaml import Document


def with_own_runs(document: Document, planned: Sequence[PlannedCell]) -> list[PlannedCell]:
    """Return the cells with the laws that profiles with `own_runs: new` leave out, all of which must agree to it."""
    matrix = Matrix(read_content(document), planned, declared_scopes(LAWS_DIRECTORY), {}, calibration_s=0.0)
    by_profile = [
        _nothing_new(matrix, matrix.profile_cells(name))
        for name, profile in matrix.profiles.items()
        if profile.own_runs == "new"
    ]
    return [msgspec.structs.replace(each, nothing_new=_agreed(each.cell, by_profile)) for each in planned]


def _agreed(cell: Cell, by_profile: Iterable[Mapping[Cell, Sequence[str]]]) -> tuple[str, ...]:
    """Return the laws that all profiles which have the cell leave out there."""
    left_out = [laws[cell] for laws in by_profile if cell in laws]
    return tuple(law for law in left_out[0] if all(law in others for others in left_out)) if left_out else ()


def _nothing_new(matrix: Matrix, cells: Iterable[Cell]) -> dict[Cell, list[str]]:
    """Return, by cell, the laws whose further run shows no fault there that the profile does not show already.

    A fault is a defect of the catalogue that the CPU can show. Laws that judge the training of a cell, which is run for
    them in any case, come first. Each law judges one cell at least of each number of ranks.
    """
    shown = {cell: _shown(matrix, cell) for cell in cells}
    own = {law for law, scope in matrix.scopes.items() if scope.own_run}
    seen = {defect for by_law in shown.values() for law in by_law.keys() - own for defect in by_law[law]}
    judged: set[tuple[str, int]] = set()
    left_out: dict[Cell, list[str]] = {}
    for cell, by_law in shown.items():
        left_out[cell] = []
        for law in by_law:
            if law not in own:
                continue
            if (law, cell.world_size) in judged and by_law[law] <= seen:
                left_out[cell].append(law)
            judged.add((law, cell.world_size))
            seen |= by_law[law]
    return left_out


def _shown(matrix: Matrix, cell: Cell) -> dict[str, set[str]]:
    """Return the defects that a cell shows to each law that holds there."""
    facts, laws = cell.facts(), matrix.laws_on(cell)
    shown: dict[str, set[str]] = {law: set() for law in laws}
    for defect in defects():
        if (
            "gloo" in defect.substrates
            and not shown.keys().isdisjoint(defect.laws)
            and compiled(defect.cells).holds(facts)
        ):
            for law in shown.keys() & {*defect.laws}:
                shown[law].add(defect.id)
    return shown
