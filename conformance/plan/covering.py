"""Covering arrays: few rows in which every combination of t values of different axes occurs.

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
    """Combinations of values that no row may have."""

    axes: Collection[str]
    """Axes on which the rule depends."""
    forbids: Callable[[Row], bool]
    """Predicate on a row that has values of these axes, and possibly of others."""


def covering_rows(axes: Mapping[str, Sequence[Any]], *, strength: int, rules: Sequence[Rule]) -> list[dict[str, Any]]:
    """Return rows with a value of each axis, in which every allowed combination of `strength` values occurs.

    Deterministic. Raises ValueError if there are fewer axes than `strength`.
    """
    if strength > len(axes):
        raise ValueError(f"strength {strength} needs at least as many axes with several values; there are {len(axes)}")

    def named(row: Row) -> dict[str, Any]:
        return {axis: axes[axis][index] for axis, index in row.items()}

    constraints = [
        {
            "operator": "fn",
            "requires": sorted(rule.axes),
            "evaluate": lambda row, rule=rule: not rule.forbids(named(row)),
        }
        for rule in rules
    ]
    # Indices instead of values: to covertable True and 1 would be the same.
    indices = {axis: list(range(len(values))) for axis, values in axes.items()}
    return [named(row) for row in covertable.make(indices, strength=strength, constraints=constraints)]
