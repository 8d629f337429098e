"""Derivation of cells: each feature alone, covering arrays of the axes, and products of some axes.

Most faults of software need no more than two or three features to show (NIST SP 800-142, section 2), while all
combinations of two dozen axes would be billions of cells. Cells without a measurement are chosen by a model of costs.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import asdict

from conformance.covering_arrays.combinations import Row
from conformance.covering_arrays.covering import Cost, covering_rows
from conformance.plan.cells import AxisValue, Cell, axis_default, cell_from_axes, is_compiled_by_inductor
from conformance.plan.content import Content, Section, Values, read_content
from conformance.plan.mesh import Mesh
from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import Document

_ROUNDS = {2: 15, 3: 0}
"""Rounds in which an array is improved, by strength: with three axes a round takes longer than it saves."""


def derive(document: Document, locked: Mapping[str, Sequence[Cell]] | None = None) -> dict[str, list[Cell]]:
    """Return the cells of each section of a matrix, in the order of the file; a cell belongs to its first section.

    Covering arrays count combinations that cells of earlier sections cover, and keep the cells of `locked`, by section,
    that are still allowed and needed, so that a change of the matrix changes few ids. Raises ConfigError, with file and
    line, for a section without a cell of its own or with too few axes, and for an exclusion that matches nothing.
    """
    content = read_content(document)
    sections: dict[str, list[Cell]] = {}
    known: dict[Cell, None] = {}
    for name, section in content.cells.items():
        try:
            kept = [cell for cell in (locked or {}).get(name, ()) if cell not in known]
            cells = dict.fromkeys(_cells(content, section, earlier=list(known), kept=kept))
        except UsageError as error:
            raise document.error(f"$.cells.{name}", str(error)) from None
        sections[name] = [cell for cell in cells if cell not in known]
        known |= cells
        if not sections[name]:
            message = f"section `{name}` has no cell that no earlier section has: remove it, or widen its axes"
            raise document.error(f"$.cells.{name}", message)
    for index, rule in enumerate(content.exclusions):
        if not any(rule.affects(axes) for axes in _combined(content)):
            message = f"the exclusion `{rule.when}` matches nothing: remove or correct it"
            raise document.error(f"$.exclusions[{index}].when", message)
    return sections


def _cells(content: Content, section: Section, *, earlier: Sequence[Cell], kept: Sequence[Cell]) -> Iterator[Cell]:
    if section.strength is None:
        if section.meshes:
            return _singles(content, section)
        return _product(content, section.axes or {})
    axes = section.axes or content.axes
    if section.meshes:
        axes = {**axes, "mesh": [*section.meshes]}
    return iter(covering_cells(content, axes, section.strength, earlier=earlier, kept=kept, share=section.share))


def _combined(content: Content) -> Iterator[Mapping[str, Values]]:
    """Yield the axes of the matrix with all their values, and those of each section."""
    yield {axis: _values(content, axis) for axis in {**content.axes, **content.alone}}
    yield from (section.axes for section in content.cells.values() if section.axes)


def _singles(content: Content, section: Section) -> Iterator[Cell]:
    """Yield each mesh without any feature but the base, and each value of another axis alone on each of the meshes.

    A feature that none of the meshes can have stands on the first mesh that can, if any. A section that has axes of its
    own has no other meshes than its own either.
    """
    meshes = section.meshes or []
    all_meshes = dict.fromkeys([*(() if section.axes else _values(content, "mesh")), *meshes])
    plain = {str(mesh): Cell(mesh=str(mesh)).but(**section.base) for mesh in all_meshes}
    yield from (cell for cell in plain.values() if content.exclusion_of(cell) is None)
    for axis, value in _features(section.axes) if section.axes else _features(content.axes, content.alone):
        if axis in section.base:
            continue
        found = [cell for mesh in meshes if (cell := _single(content, plain[mesh], axis, value)) is not None]
        others = (_single(content, cell, axis, value) for cell in plain.values())
        yield from found or itertools.islice(filter(None, others), 1)


def _values(content: Content, axis: str) -> Values:
    """Return the values of an axis, its default among them."""
    named = [*content.axes.get(axis, []), *content.alone.get(axis, [])]
    return list(dict.fromkeys([axis_default(axis), *named]))


def _features(*groups: Mapping[str, Values]) -> Iterator[tuple[str, AxisValue]]:
    """Yield each value of each axis but the mesh that is not the axis's default."""
    for axes in groups:
        for axis, values in axes.items():
            yield from ((axis, value) for value in values if axis != "mesh" and value != axis_default(axis))


def _single(content: Content, cell: Cell, axis: str, value: AxisValue, *, more: int = 2) -> Cell | None:
    """Return the smallest cell with this feature, adding at most `more` prerequisite values; None if too few."""
    featured = cell.but(**{axis: value})
    rule = content.exclusion_of(featured)
    if rule is None:
        return featured
    needed = [
        (name, other) for name, other in _features(content.axes, content.alone) if name in rule.axes - {axis, "mesh"}
    ]
    for depth in range(more):
        for name, other in needed:
            found = _single(content, featured, name, other, more=depth)
            if found is not None and getattr(found, axis) == value:
                return found
    return None


def _product(content: Content, axes: Mapping[str, Values]) -> Iterator[Cell]:
    for values in itertools.product(*axes.values()):
        cell = cell_from_axes(dict(zip(axes, values, strict=True)))
        if content.exclusion_of(cell) is None:
            yield cell


def covering_cells(
    content: Content,
    axes: Mapping[str, Values],
    strength: int,
    *,
    earlier: Sequence[Cell],
    kept: Sequence[Cell] = (),
    share: float,
) -> list[Cell]:
    """Return cells that, with earlier cells, have all allowed combinations of `strength` values.

    Cells of an earlier array, `kept`, are among them if they are allowed and needed.
    """
    fixed = {axis: values[0] for axis, values in axes.items() if len(values) == 1}
    free = {axis: values for axis, values in axes.items() if len(values) > 1}
    rows = covering_rows(
        free,
        strength=strength,
        rules=content.rules(free, fixed),
        given=[asdict(cell) for cell in earlier if all(getattr(cell, axis) == value for axis, value in fixed.items())],
        kept=[asdict(cell) for cell in kept if _is_row(cell, free, fixed)],
        cost=Cost(sorted(COST_AXES & free.keys()), lambda row: worth_s(cell_from_axes(_costly(fixed, row)))),
        until=share,
        rounds=_ROUNDS[strength],
    )
    return [cell_from_axes({**fixed, **row}) for row in rows]


def _is_row(cell: Cell, free: Mapping[str, Values], fixed: Mapping[str, AxisValue]) -> bool:
    """Return whether a cell has the fixed values, and the default of each axis that is neither fixed nor free."""
    return cell == cell_from_axes({**fixed, **{axis: getattr(cell, axis) for axis in free}})


def _costly(fixed: Row, row: Row) -> dict[str, AxisValue]:
    return {axis: value for axis, value in {**fixed, **row}.items() if axis in COST_AXES}


# Expected durations. Bases of meshes and factors are rounded coefficients of a least-squares fit to the logarithms of
# 318 measured durations, of cells with many features that are not compiled (standard deviation of the residuals: 0.15).
# The times of compilation, of three mesh dimensions, of one rank, and of eight ranks without replicas are rough figures
# from a few cells or none.

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
CALIBRATION_S = 0.09
"""Time that `experiments.calibration` takes on the reference machine, whose seconds all durations are.

It belongs to the durations of the lock file: with another figure, all of these must be measured again."""
_WORLD_S = {1: 0.4, 2: 0.75, 3: 1.2, 4: 1.35, 6: 1.7, 8: 2.0}
"""Duration of a run of three steps and of its verdicts, with shards alone, by ranks, on the reference machine."""
_LARGEST_WORLD = 8
_SIMULATED_S = 3.0
"""Rough duration of a cell that is only simulated, in one process."""


def estimated_s(cell: Cell) -> float:
    """Return the expected duration of a cell's runs and verdicts in seconds, on the reference machine."""
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
    if cell.model == "large":  # products of all ranks' tokens
        seconds += 2.0 * cell.steps * mesh.dp_replicate * mesh.dp_shard
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
