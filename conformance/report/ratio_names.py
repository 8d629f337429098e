"""Names of the ratios by which a fault scales results: sizes of the mesh, their inverses and square roots."""

import math
import statistics
from collections.abc import Sequence

from conformance.plan.selection import Facts

RATIO_SPREAD = 0.01
"""Largest relative difference of two ratios that count as equal."""
_SIZES = ("dp_shard", "dp_replicate", "tp", "pp", "dp", "world", "accumulation")


def fitting_names(ratio: float, facts: Facts) -> list[str]:
    """Return the names of all factors that a ratio equals in a cell: `dp_shard`, `1/dp`, `sqrt(tp)`, `1/sqrt(tp)`."""
    return [name for name, factor in _factors(facts).items() if are_equal(ratio, factor)]


def plausible_names(names: Sequence[str], passing: Sequence[Facts]) -> list[str]:
    """Return the names whose size is 1 in all cells on which the law passes: a fault in a larger one would show there.

    All names if none is left, since the fault may also depend on something else.
    """
    return [name for name in names if not any(name in _factors(facts) for facts in passing)] or list(names)


def are_equal(ratio: float, other: float) -> bool:
    """Return whether two ratios differ by less than `RATIO_SPREAD`."""
    return abs(ratio - other) < RATIO_SPREAD * abs(other)


def common_ratio(ratios: Sequence[float | None]) -> float | None:
    """Return the median of ratios that are all equal; None if they are not, or if one is unknown."""
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < len(ratios):
        return None
    median = statistics.median(known)
    return median if max(known) - min(known) < RATIO_SPREAD * abs(median) else None


def _factors(facts: Facts) -> dict[str, float]:
    """Factors by name for each size of a cell that is not 1."""
    sizes = {name: float(facts[name]) for name in _SIZES if facts[name] != 1}
    return {
        **sizes,
        **{f"1/{name}": 1 / size for name, size in sizes.items()},
        **{f"sqrt({name})": math.sqrt(size) for name, size in sizes.items()},
        **{f"1/sqrt({name})": 1 / math.sqrt(size) for name, size in sizes.items()},
    }
