"""Map of axis by axis: which features of cells were judged together, and which pairs have failed.

A feature is an axis with another value than its default, or a dimension of the mesh with more than one rank.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from conformance.judge.verdicts import BAD
from conformance.plan.cells import AxisValue, Cell, cell_from_id
from conformance.plan.mesh import AxisError
from conformance.report.law_overview import NOT_JUDGED
from conformance.report.schema import CaseResult
from conformance.report.shared_axes import spelled

_DIMENSIONS = ("pp", "dp_shard", "dp_replicate", "tp")
_DEFAULTS: dict[str, AxisValue] = {**dict.fromkeys(_DIMENSIONS, 1), **msgspec.structs.asdict(Cell())}
_AXES = tuple(name for name in _DEFAULTS if name != "mesh")


class Tally(msgspec.Struct):
    """Number of cases that were judged, and of those that failed."""

    judged: int = 0
    failed: int = 0

    def add(self, *, failed: bool) -> None:
        """Count a case."""
        self.judged += 1
        self.failed += failed


class Pair(msgspec.Struct):
    """Two axes that cases have met; the same axis twice stands for all cases with that feature."""

    first: str
    second: str
    tally: Tally
    by_values: dict[tuple[str, str], Tally]
    """Tally of each pair of values; of one axis, the value stands twice."""


class AxisMap(msgspec.Struct):
    """Triangle of pairs of axes."""

    axes: list[str]
    """Axes with a feature in any judged case."""
    rows: list[tuple[str, list[Pair | None]]]
    """Pairs of each axis with the axes up to itself; None where no case has both features."""
    unknown: int
    """Number of judged cases whose cell id is none of this version's."""


def axis_map(cases: Sequence[CaseResult]) -> AxisMap:
    """Return the map of all cases that were judged."""
    pairs: dict[tuple[str, str], Pair] = {}
    unknown = 0
    for case in cases:
        if case.verdict in NOT_JUDGED:
            continue
        values = axes_of(case.cell)
        unknown += values is None
        _count(pairs, features(values or {}), failed=case.verdict in BAD)
    axes = [axis for axis in _AXES if (axis, axis) in pairs]
    rows = [(axis, [pairs.get((axis, other)) for other in axes[: index + 1]]) for index, axis in enumerate(axes)]
    return AxisMap(axes, rows, unknown)


def axes_of(cell_id: str) -> dict[str, str] | None:
    """Return the value of each axis and of each dimension of the mesh, as the matrix spells it; None for no cell."""
    try:
        facts = cell_from_id(cell_id).facts()
    except AxisError:
        return None
    return {axis: spelled(facts[axis]) for axis in _AXES}


def features(axes: Mapping[str, str]) -> dict[str, str]:
    """Return the axes that do not have their defaults."""
    return {axis: value for axis, value in axes.items() if value != spelled(_DEFAULTS[axis])}


def filter_tokens(cells: Sequence[str]) -> dict[str, list[str]]:
    """Return what filters know of each cell: `axis=value` of each axis of which the cells have several values.

    A feature is also there without its value, `axis`.
    """
    known = {cell: axes for cell in cells if (axes := axes_of(cell)) is not None}
    values: dict[str, set[str]] = defaultdict(set)
    for axes in known.values():
        for axis, value in axes.items():
            values[axis].add(value)
    return {
        cell: [f"{axis}={value}" for axis, value in axes.items() if len(values[axis]) > 1] + list(features(axes))
        for cell, axes in known.items()
    }


def _count(pairs: dict[tuple[str, str], Pair], values: Mapping[str, str], *, failed: bool) -> None:
    names = list(values)
    for index, first in enumerate(names):
        for second in names[: index + 1]:
            pair = pairs.setdefault((first, second), Pair(first, second, Tally(), {}))
            pair.tally.add(failed=failed)
            pair.by_values.setdefault((values[first], values[second]), Tally()).add(failed=failed)
