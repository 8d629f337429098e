"""Matrix: the cells of matrix.yaml, the laws that hold on each, and the cases of each profile."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import get_args

import msgspec

from conformance.plan.cells import Cell, axis_names, cell_from_id, trainer_config
from conformance.plan.content import Content, Exclusion, Profile, compiled, digest_of, read_content
from conformance.plan.lock import PlannedCell, locked_cells, reference_calibration_s, within
from conformance.plan.mesh import AxisError
from conformance.plan.scopes import Scope, Trainers, declared_scopes
from conformance.plan.selection import Selection, nearest
from conformance.project import LAWS_DIRECTORY
from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import allowed, load


class Case(msgspec.Struct, frozen=True):
    """Law to be judged on a cell."""

    law: str
    """Id of the law."""
    cell: Cell
    """Cell on which the law is judged."""
    trainer: str | None = None
    """Name of the trainer that is judged; None for the reference trainer as the matrix runs it."""

    @property
    def id(self) -> str:
        """Unique and stable id: `LAW/CELL`, or `LAW/TRAINER/CELL` for other people's trainers."""
        return "/".join(filter(None, (self.law, self.trainer, self.cell.id)))

    def on(self, cell: Cell) -> "Case":
        """Return the case of the same law and trainer on another cell."""
        return Case(self.law, cell, self.trainer)


class Matrix:
    """Cells and laws: `load_matrix` reads and checks them. A matrix never changes."""

    def __init__(
        self,
        content: Content,
        planned: Sequence[PlannedCell],
        scopes: Mapping[str, Scope],
        trainer_scopes: Mapping[str, Scope],
        *,
        calibration_s: float,
    ) -> None:
        self.content = content
        self.calibration_s = calibration_s
        """Time that the calibration takes on the machine of `seconds`."""
        self.planned = tuple(planned)
        """All cells, best first."""
        self.scopes = dict(scopes)
        """Scopes of the laws of the reference trainer by id, in the order in which laws are listed."""
        self.trainer_scopes = dict(trainer_scopes)
        """Scopes of the laws of any trainer, by id."""
        self._laws: dict[Cell, list[str]] = {}
        self._cases: dict[tuple[str, float | None], dict[Cell, tuple[Case, ...]]] = {}

    @property
    def profiles(self) -> dict[str, Profile]:
        """Profiles by name."""
        return self.content.profiles

    @property
    def exclusions(self) -> list[Exclusion]:
        """Rules for cells that cannot exist."""
        return self.content.exclusions

    @cached_property
    def cells(self) -> dict[str, Cell]:
        """All cells by id."""
        return {planned.cell.id: planned.cell for planned in self.planned}

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Expected duration of each cell in seconds on the reference machine, by id."""
        return {planned.cell.id: planned.seconds for planned in self.planned}

    @cached_property
    def _nothing_new(self) -> dict[Cell, frozenset[str]]:
        return {planned.cell: frozenset(planned.nothing_new) for planned in self.planned}

    @property
    def digest(self) -> str:
        """SHA-256 of the content and the cells, independent of comments, layout and order of keys."""
        cells = [[each.section, each.cell.id, *each.nothing_new] for each in self.planned]
        return digest_of([self.content, cells])

    def laws(self) -> tuple[str, ...]:
        """Return the ids of the laws of the reference trainer, in order."""
        return tuple(self.scopes)

    def trainer_laws(self) -> tuple[str, ...]:
        """Return the ids of the laws of any trainer, in order."""
        return tuple(self.trainer_scopes)

    def trainer_cases(self, trainer: str, *, only: Selection | None = None, is_fast: bool = False) -> tuple[Case, ...]:
        """Return the cases of another trainer: of each of its cells those of all laws that hold there.

        The cells are `TRAINER_CELLS`, or `FAST_CELLS` of a fast session.
        """
        cells = [cell for cell in (FAST_CELLS if is_fast else TRAINER_CELLS) if only is None or only(cell)]
        return tuple(case for cell in cells for case in self.cases_on(cell, trainer=trainer))

    def cases_on(self, cell: Cell, *, trainer: str | None = None) -> tuple[Case, ...]:
        """Return the cases of all laws that hold on a cell, for the reference trainer or another one."""
        if trainer is None:
            return tuple(Case(law, cell) for law in self.laws_on(cell))
        return tuple(Case(law, cell, trainer) for law, scope in self.trainer_scopes.items() if scope.holds(cell))

    def is_possible(self, case: Case) -> bool:
        """Return whether a law is judged on a cell that its trainer can run, and no rule excludes the cell."""
        if self.content.exclusion_of(case.cell) is not None:
            return False
        if case.trainer is not None:
            return is_trainer_cell(case.cell) and self.trainer_scopes[case.law].holds(case.cell)
        try:
            trainer_config(case.cell)
        except UsageError:
            return False  # a value that can have no effect there
        return self.scopes[case.law].holds(case.cell)

    def profile(self, name: str) -> Profile:
        """Return the profile of this name, `trainers` too; raises UsageError for an unknown profile."""
        if name == TRAINERS:
            return TRAINER_PROFILE
        if name not in self.profiles:
            raise UsageError(f"unknown profile `{name}`{allowed(name, self.profiles)}")
        return self.profiles[name]

    def cell(self, cell_id: str, *, trainer: str | None = None) -> Cell:
        """Return the cell with this id, in the matrix or not; raises UsageError, with the nearest ids, if none has."""
        try:
            return cell_from_id(cell_id)
        except AxisError:
            near = nearest(cell_id, self.cells if trainer is None else [cell.id for cell in TRAINER_CELLS])
            hint = f"near: {', '.join(near)}" if near else "see `python -m conformance list`"
            raise UsageError(f"no cell has the id `{cell_id}`; {hint}") from None

    def profile_cells(self, name: str, *, budget_s: float | None = None) -> tuple[Cell, ...]:
        """Return the cells of a profile, best first, or with a budget the first of which a session ends in that time.

        Raises UsageError for an unknown profile.
        """
        profile = self.profile(name)
        selected = compiled(profile.cells) if profile.cells else None
        planned = [each for each in self.planned if selected is None or selected(each.cell)]
        if budget_s is not None:
            return tuple(each.cell for each in within(planned, budget_s))
        must: list[PlannedCell] = []
        others: list[PlannedCell] = []
        for each in planned:
            (must if profile.must == "all" or each.section in profile.must else others).append(each)
        spent_s = sum(each.seconds for each in must)
        more = within(others, 0.0 if profile.budget_s is None else profile.budget_s - spent_s)
        chosen = {each.cell for each in (*must, *more)}
        return tuple(each.cell for each in planned if each.cell in chosen)

    def cases(
        self, profile: str, *, only: Selection | None = None, seed: int = 0, budget_s: float | None = None
    ) -> tuple[Case, ...]:
        """Return the cases of a profile: of each cell, best first, those of the laws that judge there.

        `seed` is added to the seed of each cell after the cell was selected. Raises UsageError for an unknown profile.
        """
        if (profile, budget_s) not in self._cases:
            cells = self.profile_cells(profile, budget_s=budget_s)
            self._cases[profile, budget_s] = {
                cell: tuple(Case(law, cell) for law in self.laws_in(profile, cell)) for cell in cells
            }
        by_cell = self._cases[profile, budget_s]
        cases = [case for cell in by_cell if only is None or only(cell) for case in by_cell[cell]]
        if seed:
            return tuple(Case(case.law, case.cell.but(seed=case.cell.seed + seed)) for case in cases)
        return tuple(cases)

    def cells_of(self, law: str) -> list[Cell]:
        """Return the cells on which a law holds, also one of any trainer; none for an unknown law."""
        if law in self.trainer_scopes:
            return [cell for cell in TRAINER_CELLS if self.trainer_scopes[law].holds(cell)]
        if law not in self.scopes:
            return []
        return [cell for cell in self.cells.values() if self.scopes[law].holds(cell)]

    def laws_in(self, profile: str, cell: Cell) -> list[str]:
        """Return the ids of the laws that judge a cell in a profile: of those that hold there, see `Profile.own_runs`.

        Raises UsageError for an unknown profile.
        """
        if self.profile(profile).own_runs == "all":
            return self.laws_on(cell)
        left_out = self._nothing_new.get(cell, frozenset())
        return [law for law in self.laws_on(cell) if law not in left_out]

    def laws_on(self, cell: Cell) -> list[str]:
        """Return the ids of the laws that hold on a cell, in order."""
        if cell not in self._laws:
            facts = cell.facts()
            self._laws[cell] = [law for law, scope in self.scopes.items() if scope.judges(facts)]
        return self._laws[cell]


def load_matrix(path: Path, *, laws_directory: Path = LAWS_DIRECTORY) -> Matrix:
    """Read and check a matrix, its lock file, and the scopes of the laws.

    Raises ConfigError, with file and line, for all that `strict_yaml` refuses, for unknown axes, values, sections and
    names in selections, for duplicates, for a profile without a case, and for a lock file of another matrix or none.
    """
    document = load(path)
    content = read_content(document)
    scopes, trainer_scopes = (declared_scopes(laws_directory, of=of) for of in get_args(Trainers))
    planned, calibration_s = locked_cells(path, content), reference_calibration_s(path)
    matrix = Matrix(content, planned, scopes, trainer_scopes, calibration_s=calibration_s)
    for name in matrix.profiles:
        if not any(map(matrix.laws_on, matrix.profile_cells(name))):
            message = f"profile `{name}` selects nothing: name other sections, or widen `cells`"
            raise document.error(f"$.profiles.{name}", message)
    return matrix


TRAINERS = "trainers"
"""Name of the profile, which no matrix has: `--subject` selects it."""
TRAINER_PROFILE = Profile(note="other people's trainers, on the cells that any trainer may have", deadline_s=60.0)
TRAINER_CELLS = tuple(
    Cell(**{"init": "full"} | options)
    for options in (
        {},
        {"accumulation": 2},
        {"accumulation": 2, "batches": "uneven"},
        {"init": "meta"},
        {"tied_embeddings": True},
        {"init": "meta", "tied_embeddings": True},
        {"saved_on": "same"},
        {"precision": "bf16-mp"},
        {"precision": "bf16-mp", "accumulation": 2, "offload": "cpu"},
        {"mesh": "hsdp2x2"},
        {"mesh": "hsdp2x2", "accumulation": 2, "batches": "uneven"},
        {"mesh": "dp2-tp2"},
        {"mesh": "dp2-tp2", "accumulation": 2, "batches": "uneven"},
        {"mesh": "dp2-tp2", "saved_on": "same"},
        {"mesh": "dp2-tp2", "precision": "bf16-mp"},
    )
)
"""All cells of the profile, in the order in which they are run."""
FAULT_CELLS = tuple(cell for cell in TRAINER_CELLS if cell == Cell(mesh=cell.mesh, init="full"))
"""The plain cell of each mesh, the first on which faults are injected to see whether the laws see them."""
_FAST = (
    {"accumulation": 2, "batches": "uneven"},
    {"init": "meta"},
    {"tied_embeddings": True},
    {"saved_on": "same"},
    {"precision": "bf16-mp"},
    {"mesh": "hsdp2x2", "accumulation": 2, "batches": "uneven"},
    {"mesh": "dp2-tp2", "accumulation": 2, "batches": "uneven"},
)
FAST_CELLS = tuple(cell for cell in TRAINER_CELLS if cell in [Cell(**{"init": "full"} | options) for options in _FAST])
"""Cells of a fast session.

Each of the wrong functions in tests/support/subject_models.py fails on one of them. Accumulated steps, plain ones in
between, and ranks with unequal numbers of samples are in one cell of each mesh.
"""
_VALUES = {name: {getattr(cell, name) for cell in TRAINER_CELLS} for name in axis_names()}


def is_trainer_cell(cell: Cell) -> bool:
    """Return whether a trainer can be asked for a cell: each of its values occurs in the profile."""
    return all(getattr(cell, name) in values for name, values in _VALUES.items())
