"""Covering arrays: few combinations of many axes, such that every t values of different axes meet in one of them.

Most faults of software need no more than two or three factors to show (NIST SP 800-142, section 2), while all
combinations of a dozen axes would be millions of cells.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import covertable  # type: ignore[import-untyped]

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """A combination that must not be."""

    axes: Collection[str]
    """Those that decide."""
    forbids: Callable[[Row], bool]
    """Asked with values of these axes, and maybe of others."""


def covering_rows(axes: Mapping[str, Sequence[Any]], *, strength: int, rules: Sequence[Rule]) -> list[dict[str, Any]]:
    """Rows with a value of each axis; every combination of `strength` values that the rules allow is in one of them.

    The same for the same input. Raises ValueError if there are fewer axes than `strength`.
    """
    if strength > len(axes):
        raise ValueError(f"strength {strength} needs at least as many axes with several values, there are {len(axes)}")

    def named(row: Row) -> dict[str, Any]:
        return {axis: axes[axis][place] for axis, place in row.items()}

    constraints = [
        {
            "operator": "fn",
            "requires": sorted(rule.axes),
            "evaluate": lambda row, rule=rule: not rule.forbids(named(row)),
        }
        for rule in rules
    ]
    # Places instead of values: to covertable True and 1 would be the same.
    places = {axis: list(range(len(values))) for axis, values in axes.items()}
    return [named(row) for row in covertable.make(places, strength=strength, constraints=constraints)]
