"""Content of matrix.yaml: axes, sections of cells, exclusions, and profiles."""

import hashlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from conformance.covering_arrays.combinations import Row, Rule
from conformance.plan.cells import AxisValue, Cell, axis_names, axis_value, cell_from_axes
from conformance.plan.mesh import AxisError
from conformance.plan.selection import Selection, SelectionError, parse
from reference_trainer.strict_yaml import Document, allowed, convert

Name = Annotated[str, Meta(pattern=r"^[a-z0-9-]+\Z")]
LawId = Annotated[str, Meta(pattern=r"^([A-Z]+-[0-9]+|[a-z][a-z0-9]*(-[a-z0-9]+)*)\Z")]
Text = Annotated[str, Meta(pattern=r"\S")]
Values = Annotated[list[AxisValue], Meta(min_length=1)]

_MESH_FACTS = ("world", "dp_replicate", "dp_shard", "dp", "tp", "pp", "ep", "cp")


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Mapping in the file; a key that the file leaves out is not in the digest."""


class Section(_Entry, frozen=True, kw_only=True):
    """Cells derived in one way: singles (`meshes`), a covering array (`strength`), or a product of `axes`."""

    note: Text
    """Purpose of these cells."""
    meshes: Annotated[list[str], Meta(min_length=1)] | None = None
    """Meshes on which each value of an axis stands alone; with `strength`, those of the covering array."""
    base: dict[str, AxisValue] = {}
    """Values that all singles have."""
    strength: Annotated[int, Meta(ge=2, le=3)] | None = None
    """Number of axes any values of which meet in a cell of the covering array."""
    share: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Share of the combinations that the covering array must have."""
    axes: dict[str, Values] | None = None
    """Axes of a product, of singles or of a covering array; without these, the axes of the matrix."""


class Exclusion(_Entry, frozen=True, kw_only=True):
    """Cells that cannot exist: torch or the trainer refuses each of them."""

    when: Text
    """Selection of the cells, see `conformance.plan.selection`."""
    reason: Text
    """Reason for which the cells cannot exist."""
    reference: Text
    """Source file or document that says so."""

    @property
    def axes(self) -> frozenset[str]:
        """Axes on which the rule depends: derived facts follow from the mesh."""
        return frozenset("mesh" if name in _MESH_FACTS else name for name in self.selection.names)

    @property
    def selection(self) -> Selection:
        """The selection, compiled once in a process."""
        return compiled(self.when)

    def matches(self, cell: Cell) -> bool:
        """Return whether the rule excludes the cell."""
        return self.selection(cell)

    def affects(self, axes: Mapping[str, Sequence[AxisValue]]) -> bool:
        """Return whether the rule excludes any combination of the values of these axes."""
        decide = {axis: values for axis, values in axes.items() if axis in self.axes}
        fixed = {axis: values[0] for axis, values in axes.items() if len(values) == 1}
        rows = (dict(zip(decide, values, strict=True)) for values in itertools.product(*decide.values()))
        return any(self.matches(cell_from_axes({**fixed, **row})) for row in rows)


class Profile(_Entry, frozen=True, kw_only=True):
    """Named selection of cells, which all laws that hold there judge."""

    note: Text
    """Purpose of the profile."""
    must: list[Name] | Literal["all"] = []
    """Sections of which the profile has all cells."""
    budget_s: Annotated[float, Meta(gt=0.0)] | None = None
    """Time that the profile may take by the durations of the lock file: after `must`, the first cells of that file."""
    cells: Text | None = None
    """Selection among these cells, see `conformance.plan.selection`."""
    deadline_s: Annotated[float, Meta(gt=0.0)]
    """Time limit of one case in seconds."""
    sweep_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Share of the samples of each sweep that the profile tries; more where a kind of sample needs one, see
    `conformance.sweeps.drawing`."""
    own_runs: Literal["all", "new"] = "all"
    """Where laws judge that need a further run of a cell: on `all` cells on which they hold, or only where such a run
    shows a `new` fault, which neither the training of a cell nor a further run before it shows, and once on each number
    of ranks. matrix.lock names the laws that are left out of each cell."""
    requires_devices: Annotated[int, Meta(ge=0)] = 0
    """Number of CUDA devices without which no case of the profile is run."""
    allows: list[Literal["waived", "unsupported"]] = msgspec.field(default_factory=lambda: ["waived", "unsupported"])
    """Verdicts with which a session is still conformant.

    Without `waived` a known issue fails like any other; without `unsupported` a session with an unsupported case is
    incomplete."""


class Content(_Entry, frozen=True, kw_only=True):
    """Content of matrix.yaml."""

    schema: Literal[2]
    """Version of the file format."""
    axes: dict[str, Values]
    """Values that cells combine: of each axis its default and more."""
    alone: dict[str, Values] = {}
    """Further values, which no combination has."""
    cells: dict[Name, Section]
    """Sections of cells by name."""
    exclusions: list[Exclusion] = []
    """Rules for cells that cannot exist."""
    profiles: dict[Name, Profile]
    """Profiles by name."""

    def exclusion_of(self, cell: Cell) -> Exclusion | None:
        """Return the first rule that excludes a cell, if any."""
        return next((rule for rule in self.exclusions if rule.matches(cell)), None)

    def rules(self, free: Mapping[str, Sequence[AxisValue]], fixed: Row | None = None) -> list[Rule]:
        """Return the exclusions as rules on rows of the free axes, where the fixed axes have one value each."""
        given = fixed or {}
        every = {**free, **{axis: [value] for axis, value in given.items()}}
        return [_rule(exclusion, free, given) for exclusion in self.exclusions if exclusion.affects(every)]

    @property
    def combined_meshes(self) -> list[str]:
        """Meshes that cells combine with features, each once."""
        section_meshes = (section.meshes or [] for section in self.cells.values() if section.strength is not None)
        return list(dict.fromkeys([*map(str, self.axes.get("mesh", [])), *itertools.chain(*section_meshes)]))

    @property
    def cells_digest(self) -> str:
        """SHA-256 of all sections that determine the derived cells: all but the profiles."""
        return digest_of([self.axes, self.alone, self.cells, self.exclusions])


def _rule(exclusion: Exclusion, free: Mapping[str, Sequence[AxisValue]], fixed: Row) -> Rule:
    decide = sorted(exclusion.axes & free.keys())

    def forbids(row: Row) -> bool:
        return exclusion.matches(cell_from_axes({**fixed, **{axis: row[axis] for axis in decide}}))

    return Rule(decide, forbids)


@cache
def compiled(text: str) -> Selection:
    """Return a selection, compiled once in a process; raises SelectionError as `parse` does."""
    return parse(text)


def digest_of(value: object) -> str:
    """Return the SHA-256 of a value, independent of the order of keys."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


def read_content(document: Document) -> Content:
    """Check a document; raises ConfigError, with file and line, for mistakes that show without the derived cells."""
    content = convert(document, Content)
    for field in ("axes", "alone"):
        for axis, values in getattr(content, field).items():
            _check_axis(document, f"$.{field}.{axis}", axis, values)
    for index, rule in enumerate(content.exclusions):
        _check_exclusion(document, f"$.exclusions[{index}].when", rule)
    for name, section in content.cells.items():
        _check_section(document, f"$.cells.{name}", section)
    for name, profile in content.profiles.items():
        _check_profile(document, f"$.profiles.{name}", profile, content.cells)
    return content


def _check_section(document: Document, where: str, section: Section) -> None:
    for axis, values in (section.axes or {}).items():
        _check_axis(document, f"{where}.axes.{axis}", axis, values)
    _check_axis(document, f"{where}.meshes", "mesh", section.meshes or [])
    for axis, value in section.base.items():
        _check_axis(document, f"{where}.base.{axis}", axis, [value])
    if section.base and (section.strength or not section.meshes):
        raise document.error(f"{where}.base", "only singles (`meshes`) have a base: give an axis one value instead")
    if section.meshes and section.axes and section.strength:
        raise document.error(where, "with `meshes` and `strength` the axes are those of the matrix: leave out `axes`")
    if section.meshes and "mesh" in (section.axes or {}):
        raise document.error(f"{where}.axes", "`meshes` says on which meshes singles stand: leave `mesh` out of `axes`")
    if not (section.meshes or section.strength or section.axes):
        raise document.error(where, "write `meshes` (singles), `strength` (a covering array) or `axes` (a product)")


def _check_exclusion(document: Document, where: str, rule: Exclusion) -> None:
    try:
        names = rule.selection.names
    except SelectionError as error:
        raise document.error(where, str(error)) from None
    if wrong := sorted(names & {"id", "features"}):
        raise document.error(where, f"an exclusion cannot ask for `{wrong[0]}`: name axes, or facts of the mesh")


def _check_profile(document: Document, where: str, profile: Profile, sections: Collection[str]) -> None:
    must = [] if profile.must == "all" else profile.must
    for index, section in enumerate(must):
        if section not in sections:
            raise document.error(f"{where}.must[{index}]", f"unknown section `{section}`{allowed(section, sections)}")
    _check_unique(document, f"{where}.must", must)
    try:
        if profile.cells is not None:
            compiled(profile.cells)
    except SelectionError as error:
        raise document.error(f"{where}.cells", str(error)) from None


def _check_axis(document: Document, where: str, axis: str, values: Sequence[AxisValue]) -> None:
    """Raise ConfigError for an unknown axis, a value that the axis cannot have, or a value given twice."""
    if axis not in axis_names():
        raise document.error(where, f"unknown axis `{axis}`{allowed(axis, axis_names())}")
    for index, value in enumerate(values):
        try:
            axis_value(axis, value)
        except AxisError as error:
            raise document.error(f"{where}[{index}]", str(error)) from None
    _check_unique(document, where, values)


def _check_unique(document: Document, where: str, values: Collection[AxisValue]) -> None:
    """Raise ConfigError for a value that is given twice."""
    given = list(values)
    for index, value in enumerate(given):
        if value in given[:index]:
            raise document.error(f"{where}[{index}]", f"`{value}` is given twice: keep one of them")
