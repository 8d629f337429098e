"""Axis values that tell the cells on which a law fails from those on which it passes."""

from collections.abc import Sequence

from conformance.plan.cells import AxisValue, Cell, axis_names
from conformance.plan.selection import Facts

_SIZES = ("dp_shard", "dp_replicate", "tp", "pp", "dp", "world")
_DEFAULTS = Cell().facts()


def shared_values(failing: Sequence[Facts], passing: Sequence[Facts]) -> dict[str, str]:
    """Return the values that all failing cells have and no passing cell has, by axis, as a selection spells them.

    None where no cell passes, from which nothing could be told apart. Sizes of the mesh, `2 or 4`, if no axis differs.
    """
    if not failing or not passing:
        return {}
    common = {name: failing[0][name] for name in axis_names() if len({facts[name] for facts in failing}) == 1}
    telling = {name: spelled(value) for name, value in common.items() if all(facts[name] != value for facts in passing)}
    return telling or _telling_sizes(failing, passing)


def features(facts: Facts) -> int:
    """Return the number of axes on which a cell does not have the default."""
    return sum(facts[name] != _DEFAULTS[name] for name in axis_names())


def _telling_sizes(failing: Sequence[Facts], passing: Sequence[Facts]) -> dict[str, str]:
    """Values of the first size of the mesh that no passing cell has."""
    for name in _SIZES:
        values = {facts[name] for facts in failing}
        if not values & {facts[name] for facts in passing}:
            return {name: " or ".join(map(spelled, sorted(values)))}
    return {}


def spelled(value: AxisValue) -> str:
    """Return a value as a selection spells it: `true` for True."""
    return str(value).lower() if isinstance(value, bool) else str(value)
