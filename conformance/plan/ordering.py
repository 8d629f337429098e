"""Order of cells: best first, by what each adds per second to those before it."""

import heapq
from collections.abc import Hashable, Mapping, Sequence

Gains = Mapping[Hashable, float]
"""Weights of the properties of a cell; a property counts once, for the first cell that has it."""


def best_first(names: Sequence[str], gains: Mapping[str, Gains], seconds: Mapping[str, float]) -> list[str]:
    """Return the names in greedy order of weight that no earlier name has, per second; ties keep their order.

    What a name adds can only fall while others are chosen, so that a stale value is an upper bound (lazy greedy,
    Minoux 1978).
    """
    seen: set[Hashable] = set()

    def rate(name: str) -> float:
        return sum(weight for what, weight in gains[name].items() if what not in seen) / max(seconds[name], 0.01)

    queue = [(-rate(name), position, name) for position, name in enumerate(names)]
    heapq.heapify(queue)
    ordered = []
    while queue:
        _, position, name = heapq.heappop(queue)
        now = (-rate(name), position, name)
        if queue and now > queue[0]:
            heapq.heappush(queue, now)
            continue
        ordered.append(name)
        seen |= gains[name].keys()
    return ordered
