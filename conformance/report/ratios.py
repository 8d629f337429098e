"""Ratios by which results are off: sizes of the mesh, their inverses and square roots."""

import math
import statistics
from collections.abc import Sequence

from conformance.plan.selection import Facts

RATIO_SPREAD = 0.01
"""Largest relative difference of two ratios that count as equal."""
MESH_SIZES = ("dp_shard", "dp_replicate", "tp", "pp", "dp", "world")
"""Facts of a cell that are numbers of ranks."""


def ratio_names(ratio: float, facts: Facts) -> list[str]:
    """Return the names of all factors that a ratio equals in a cell: `dp_shard`, `1/dp`, `sqrt(tp)`, `1/sqrt(tp)`."""
    return [name for name, factor in _factors(facts).items() if are_equal(ratio, factor)]


def _factors(facts: Facts) -> dict[str, float]:
    """Return the factors by name for each size of a cell that is not 1."""
    sizes = {name: float(facts[name]) for name in (*MESH_SIZES, "accumulation") if facts[name] != 1}
    roots = {f"sqrt({name})": math.sqrt(size) for name, size in sizes.items()}
    inverses, inverse_roots = ({f"1/{name}": 1 / size for name, size in each.items()} for each in (sizes, roots))
    return {**sizes, **inverses, **roots, **inverse_roots}


def plausible_names(names: Sequence[str], passing: Sequence[Facts]) -> list[str]:
    """Return the names whose size is 1 in all cells on which the law passes: a fault in a larger one would show there.

    All names if none is left, since the fault may also depend on something else.
    """
    passed = {name for facts in passing for name in _factors(facts)} if names else set()
    return [name for name in names if name not in passed] or list(names)


def are_equal(ratio: float, number: float) -> bool:
    """Return whether a ratio counts as equal to a number."""
    return abs(ratio - number) < RATIO_SPREAD * abs(number)


def common_ratio(ratios: Sequence[float | None]) -> float | None:
    """Return the median of ratios that are all equal; None if they are not, or if one is unknown."""
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < len(ratios):
        return None
    median = statistics.median(known)
    return median if max(known) - min(known) < RATIO_SPREAD * abs(median) else None
