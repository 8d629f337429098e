"""matrix.yaml: which laws are checked on which cells, and which cases each profile selects."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from conformance.plan.cells import AxisValue, Cell, axis_names, axis_value, cell_from_axes
from conformance.plan.covering import Row, Rule, covering_rows
from conformance.plan.mesh import AxisError
from conformance.plan.selection import Selection, SelectionError, parse
from reference_trainer.strict_yaml import Document, allowed, convert, load

Name = Annotated[str, Meta(pattern=r"^[a-z0-9-]+\Z")]
LawId = Annotated[str, Meta(pattern=r"^[A-Z]+-[0-9]+\Z")]
Text = Annotated[str, Meta(pattern=r"\S")]

_FACTS = Cell().facts()


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Mapping in the file; a key that the file leaves out is not in the digest."""


class Family(_Entry, frozen=True, kw_only=True):
    """Laws that are all judged on all cells of a product, or of a covering array, of axis values."""

    laws: Annotated[list[LawId], Meta(min_length=1)]
    """Ids such as `PAR-1`."""
    axes: dict[str, Annotated[list[AxisValue], Meta(min_length=1)]]
    """Values of each axis to combine or to cover; all other axes have their defaults."""
    cover: Annotated[int, Meta(ge=2)] | None = None
    """Use a covering array of this strength (t-way) instead of the full product."""
    note: str | None = None
    """Reason for which these axes are combined."""


class Exclusion(_Entry, frozen=True, kw_only=True):
    """Cells that cannot exist."""

    when: Annotated[dict[str, AxisValue | Annotated[list[AxisValue], Meta(min_length=1)]], Meta(min_length=1)]
    """Value or list of values of each axis or derived fact (`tp`, `world`); the rule matches if all of them hold."""
    reason: Text
    """Reason for which the cells cannot exist."""
    reference: Text
    """Source file or document of PyTorch that says so."""

    @property
    def axes(self) -> set[str]:
        """Axes on which the rule depends; derived facts follow from the mesh, and an id from all axes."""
        if "id" in self.when:
            return set(axis_names())
        return {name if name in axis_names() else "mesh" for name in self.when}

    def matches(self, cell: Cell) -> bool:
        """Return whether the rule excludes the cell."""
        facts = cell.facts()
        return all(facts[name] in _as_list(wanted) for name, wanted in self.when.items())


class Profile(_Entry, frozen=True, kw_only=True):
    """Named selection of cases."""

    families: list[str] | Literal["all"]
    """Names of the families whose cells are selected from."""
    cells: str | None = None
    """Selection among the cells of the families, see `conformance.plan.selection`."""
    deadline_s: Annotated[float, Meta(gt=0.0)]
    """Time limit of one case in seconds."""
    requires_devices: Annotated[int, Meta(ge=0)] = 0
    """Number of CUDA devices without which no case of the profile is run."""
    allows: list[Literal["waived", "unsupported"]] = msgspec.field(default_factory=lambda: ["waived", "unsupported"])
    """Verdicts with which a session is still conformant.

    Without `waived` a known issue fails like any other; without `unsupported` a session with an unsupported case is
    incomplete."""
    note: str | None = None
    """Purpose of the profile."""


class Case(msgspec.Struct, frozen=True):
    """Law to be judged on a cell."""

    law: str
    """Id of the law."""
    cell: Cell
    """Cell on which the law is judged."""

    @property
    def id(self) -> str:
        """Unique and stable id, `LAW/CELL`."""
        return f"{self.law}/{self.cell.id}"


class Matrix(_Entry, frozen=True, kw_only=True, dict=True):
    """Content of matrix.yaml; `load_matrix` reads and checks it."""

    schema: Literal[1]
    """Version of the file format."""
    defaults: dict[str, AxisValue] = {}
    """Values of axes that a family does not name."""
    families: dict[Name, Family]
    """Families by name."""
    exclusions: list[Exclusion] = []
    """Rules for cells that cannot exist."""
    profiles: dict[Name, Profile]
    """Profiles by name."""

    def cells(self, family: str) -> tuple[Cell, ...]:
        """Return the cells of a family that can exist, in the order of the file; raises ValueError for no family."""
        self._require_family(family)
        if family not in self._kept:
            self._kept[family] = tuple(cell for cell in self.product(family) if self._exclusion_of(cell) is None)
        return self._kept[family]

    def excluded(self, family: str) -> tuple[tuple[Cell, Exclusion], ...]:
        """Return the excluded cells of a family, each with the first rule that excludes it; raises as `cells` does."""
        pairs = ((cell, self._exclusion_of(cell)) for cell in self.product(family))
        return tuple((cell, exclusion) for cell, exclusion in pairs if exclusion is not None)

    def cases(self, profile: str, *, only: Selection | None = None, seed: int = 0) -> tuple[Case, ...]:
        """Return the cases of a profile, each once, sorted by law.

        `seed` is added to the seed of each cell after the cell was selected. Raises ValueError for an unknown profile.
        """
        chosen = self.profile(profile)
        if only is None and not seed and profile in self._cases:
            return self._cases[profile]
        selections = [] if chosen.cells is None else [parse(chosen.cells)]
        selections += [] if only is None else [only]
        cases = (
            Case(law, cell.but(seed=cell.seed + seed) if seed else cell)
            for name, family in self.families.items()
            if chosen.families == "all" or name in chosen.families
            for cell in self.cells(name)
            if all(selected(cell) for selected in selections)
            for law in family.laws
        )
        rank = {law: index for index, law in enumerate(self.laws())}
        ordered = tuple(sorted(dict.fromkeys(cases), key=lambda case: rank[case.law]))
        if only is None and not seed:
            self._cases[profile] = ordered
        return ordered

    @cached_property
    def products(self) -> dict[str, Cell]:
        """Cells of all families by id, excluded or not."""
        return {cell.id: cell for family in self.families for cell in self.product(family)}

    @cached_property
    def _kept(self) -> dict[str, tuple[Cell, ...]]:
        """Cache of `cells` by family; a matrix never changes."""
        return {}

    @cached_property
    def _cases(self) -> dict[str, tuple[Case, ...]]:
        """Cache of `cases` by profile; a matrix never changes."""
        return {}

    def laws(self) -> tuple[str, ...]:
        """Return the ids of all laws: groups in the order of their first appearance, then by number."""
        ids = list(dict.fromkeys(law for family in self.families.values() for law in family.laws))
        groups = list(dict.fromkeys(law.split("-")[0] for law in ids))
        return tuple(sorted(ids, key=lambda law: (groups.index(law.split("-")[0]), int(law.split("-")[1]))))

    def profile(self, name: str) -> Profile:
        """Return the profile of this name; raises ValueError for an unknown profile."""
        if name not in self.profiles:
            raise ValueError(f"unknown profile `{name}`{allowed(name, self.profiles)}")
        return self.profiles[name]

    @property
    def digest(self) -> str:
        """SHA-256 of the content, independent of comments, layout and order of keys."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()

    def product(self, family: str) -> Iterator[Cell]:
        """Yield the cells of a family's product or covering array, excluded or not; raises as `cells` does."""
        self._require_family(family)
        chosen = self.families[family]
        if chosen.cover is not None:
            yield from _covering_cells(self, family)
            return
        for values in itertools.product(*chosen.axes.values()):
            yield cell_from_axes({**self.defaults, **dict(zip(chosen.axes, values, strict=True))})

    def covering(self, family: str) -> list[Cell]:
        """Return the cells of a family's covering array; none of these cells is excluded."""
        axes, strength = self.families[family].axes, self.families[family].cover or 2
        fixed = self.defaults | {axis: values[0] for axis, values in axes.items() if len(values) == 1}
        free = {axis: values for axis, values in axes.items() if len(values) > 1}

        def rule(exclusion: Exclusion) -> Rule:
            decide = sorted(exclusion.axes & free.keys())
            known: dict[str, bool] = {}

            def forbids(row: Row) -> bool:
                """Return whether the rule excludes a row; cached, since thousands of rows differ in other axes only."""
                key = repr([row[axis] for axis in decide])
                if key not in known:
                    known[key] = exclusion.matches(cell_from_axes({**fixed, **row}))
                return known[key]

            return Rule(decide, forbids)

        rows = covering_rows(free, strength=strength, rules=[rule(exclusion) for exclusion in self.exclusions])
        return [cell_from_axes({**fixed, **row}) for row in rows]

    def affects(self, exclusion: Exclusion, family: str) -> bool:
        """Return whether a rule excludes any combination of the family's values."""
        axes = self.families[family].axes
        fixed = self.defaults | {axis: values[0] for axis, values in axes.items()}
        decide = {axis: values for axis, values in axes.items() if axis in exclusion.axes}
        rows = (dict(zip(decide, values, strict=True)) for values in itertools.product(*decide.values()))
        return any(exclusion.matches(cell_from_axes({**fixed, **row})) for row in rows)

    def _require_family(self, family: str) -> None:
        if family not in self.families:
            raise ValueError(f"unknown family `{family}`{allowed(family, self.families)}")

    def _exclusion_of(self, cell: Cell) -> Exclusion | None:
        return next((exclusion for exclusion in self.exclusions if exclusion.matches(cell)), None)


_COVERED: dict[bytes, list[Cell]] = {}


def _covering_cells(matrix: Matrix, family: str) -> list[Cell]:
    """Return the covering array of a family; cached in the process, since computing one takes a second."""
    chosen = matrix.families[family]
    key = msgspec.json.encode([matrix.defaults, chosen.axes, chosen.cover, matrix.exclusions])
    if key not in _COVERED:
        _COVERED[key] = matrix.covering(family)
    return _COVERED[key]


def load_matrix(path: Path) -> Matrix:
    """Read and check a matrix.

    Raises ConfigError, with file and line, for all that `strict_yaml` refuses, for unknown axes, values, families and
    names in selections, for duplicates, and for entries without effect: an exclusion that matches nothing, a family
    without a cell, a profile without a case.
    """
    document = load(path)
    matrix = convert(document, Matrix)
    for axis, value in matrix.defaults.items():
        _check_fact(document, f"$.defaults.{axis}", axis, value, known=axis_names())
    for name, family in matrix.families.items():
        _check_unique(document, f"$.families.{name}.laws", family.laws)
        several = sum(len(values) > 1 for values in family.axes.values())
        if family.cover is not None and family.cover > several:
            message = f"strength {family.cover} needs at least as many axes with several values; there are {several}"
            raise document.error(f"$.families.{name}.cover", message)
        for axis, values in family.axes.items():
            _check_fact(document, f"$.families.{name}.axes.{axis}", axis, values, known=axis_names())
    _check_exclusions(document, matrix)
    for name in matrix.profiles:
        _check_profile(document, f"$.profiles.{name}", matrix, name)
    return matrix


def _check_exclusions(document: Document, matrix: Matrix) -> None:
    """Raise ConfigError for a rule that is wrong or matches nothing, and for a family without a cell that is left."""
    for index, exclusion in enumerate(matrix.exclusions):
        for name, wanted in exclusion.when.items():
            _check_fact(document, f"$.exclusions[{index}].when.{name}", name, wanted, known=tuple(_FACTS))
    for index, exclusion in enumerate(matrix.exclusions):
        if not any(matrix.affects(exclusion, family) for family in matrix.families):
            raise document.error(f"$.exclusions[{index}].when", "matches nothing: remove or correct this exclusion")
    for family in matrix.families:
        if not matrix.cells(family):
            message = f"all cells of `{family}` are excluded: remove the family, or add values to its axes"
            raise document.error(f"$.families.{family}", message)


def _check_profile(document: Document, where: str, matrix: Matrix, name: str) -> None:
    """Raise ConfigError for an unknown or repeated family, a wrong selection, or a profile without a case."""
    profile = matrix.profiles[name]
    families = [] if profile.families == "all" else profile.families
    for index, family in enumerate(families):
        if family not in matrix.families:
            message = f"unknown family `{family}`{allowed(family, matrix.families)}"
            raise document.error(f"{where}.families[{index}]", message)
    _check_unique(document, f"{where}.families", families)
    try:
        cases = matrix.cases(name)
    except SelectionError as error:
        raise document.error(f"{where}.cells", str(error)) from None
    if not cases:
        raise document.error(where, f"profile `{name}` selects nothing: name other families, or widen `cells`")


def _check_fact(
    document: Document, where: str, name: str, wanted: AxisValue | list[AxisValue], *, known: Sequence[str]
) -> None:
    """Raise ConfigError for an unknown name, a value that the axis or fact cannot have, or a value given twice."""
    if name not in known:
        raise document.error(where, f"unknown axis `{name}`{allowed(name, known)}")
    paths = [f"{where}[{index}]" for index in range(len(wanted))] if isinstance(wanted, list) else [where]
    for path, value in zip(paths, _as_list(wanted), strict=True):
        try:
            _check_value(name, value)
        except AxisError as error:
            raise document.error(path, str(error)) from None
    _check_unique(document, where, _as_list(wanted))


def _check_value(name: str, value: AxisValue) -> None:
    if name in axis_names():
        axis_value(name, value)
    elif type(value) is not type(_FACTS[name]):
        raise AxisError(f"`{name}` = {value!r}: write a value of type {type(_FACTS[name]).__name__}")


def _check_unique(document: Document, where: str, values: Sequence[AxisValue]) -> None:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise document.error(f"{where}[{index}]", f"`{value}` is given twice: keep one of them")


def _as_list(wanted: AxisValue | list[AxisValue]) -> list[AxisValue]:
    return wanted if isinstance(wanted, list) else [wanted]
