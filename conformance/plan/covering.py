"""Covering arrays: cheap rows in which every possible combination of t values of different axes occurs.

Most faults of software need no more than two or three factors to show (NIST SP 800-142, section 2), while all
combinations of a dozen axes would be millions of cells.

Rows are built one at a time as AETG does (Cohen, Dalal, Fredman, Patton 1997): some candidates grow value by value,
each value the one that adds most, and the best candidate is kept. Here a candidate is worth what it covers per second
that it takes to run. Libraries minimise the number of rows instead (covertable, PICT, allpairspy, and IPOG of ACTS),
and a row on eight ranks costs ten rows on two.
"""

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.plan.combinations import (
    Axes,
    Constraints,
    Row,
    Rule,
    Space,
    Values,
    bits,
    gains,
    learn_possible,
    seen,
    symmetric,
)

__all__ = ["Cost", "Row", "Rule", "covering_rows"]

CANDIDATES = 12
"""Rows that are tried for each row of the array."""
TICKS_PER_S = 1000
"""Costs are whole milliseconds: sums of integers are the same on every machine."""


@dataclass(frozen=True)
class Cost:
    """Time that a row takes to run."""

    axes: Collection[str]
    """Axes on which the time depends."""
    seconds: Callable[[Row], float]
    """Time in s of a row that has values of these axes, and possibly of others."""


EQUAL = Cost((), lambda _: 1.0)
"""Cost with which the number of rows is minimised."""


class _Prices:
    """Costs of rows in ms, each computed once."""

    def __init__(self, space: Space, cost: Cost) -> None:
        self.axes = [axis for axis in space.axes if axis in set(cost.axes)]
        self._space, self._cost = space, cost
        self._relevant = [owner in self.axes for owner in space.owners]
        self._known: dict[Values, int] = {}
        self.cheapest: dict[str, int] = {axis: min(self._options(axis)) for axis in self.axes}
        for axis in self.axes * 2:
            self.cheapest[axis] = min(self._options(axis), key=lambda value: self.of([value]))

    def _options(self, axis: str) -> list[int]:
        return [number for number, owner in enumerate(self._space.owners) if owner == axis]

    def of(self, values: Iterable[int]) -> int:
        """Return the cost of values; axes that have none of them have their cheapest value."""
        chosen = dict(self.cheapest)
        chosen.update((self._space.owners[value], value) for value in values if self._relevant[value])
        key = tuple(chosen.values())
        if key not in self._known:
            seconds = self._cost.seconds(self._space.row(key))
            self._known[key] = max(1, round(seconds * TICKS_PER_S))
        return self._known[key]


class _Builder:
    """Builder of the rows of an array."""

    def __init__(self, constraints: Constraints, strength: int, cost: Cost) -> None:
        self.space, self.constraints, self.strength = constraints.space, constraints, strength
        self.prices = _Prices(self.space, cost)
        self.random = random.Random(0).random
        self.options = {axis: [n for n, own in enumerate(self.space.owners) if own == axis] for axis in self.space.axes}

    @cached_property
    def value_of(self) -> NDArray[np.int64]:
        """Weight of each combination: what a row costs at least that contains its most expensive value."""
        prices = np.array([self.prices.of([value]) for value in range(len(self.space))])
        weights = prices
        for _ in range(self.strength - 1):
            weights = np.maximum(weights[..., None], prices)
        return weights

    def rows(self, wanted: NDArray[np.bool_], stop_at: int) -> Iterator[Values]:
        """Yield rows until at most `stop_at` of the wanted combinations are left."""
        weights = np.where(symmetric(wanted), self.value_of, 0)
        ascending = self.space.combinations(self.strength)
        while True:
            left = np.where(ascending, weights, 0)
            if np.count_nonzero(left) <= stop_at:
                return
            seeds = np.argwhere(left == left.max() if EXPENSIVE_FIRST else left > 0)
            chosen = [seeds[int(self.random() * len(seeds))].tolist() for _ in range(CANDIDATES)]
            rows = [self._candidate(weights, seed) for seed in chosen]
            if CLIMB_ALL:
                rows = [self._climb(weights, row) for row in rows]
            row = max(rows, key=lambda row: self._rate(weights, row))
            if not CLIMB_ALL:
                row = self._climb(weights, row)
            weights[np.ix_(*[row] * self.strength)] = 0
            yield row

    def _gain(self, weights: NDArray[np.int64], row: Sequence[int]) -> int:
        return int(weights[np.ix_(*[row] * self.strength)].sum()) // math.factorial(self.strength)

    def _rate(self, weights: NDArray[np.int64], row: Values) -> float:
        return self._gain(weights, row) / self.prices.of(row)

    def _candidate(self, weights: NDArray[np.int64], seed: Values) -> Values:
        order = sorted(self.space.masks.items(), key=lambda _: self.random())

        def best_first(chosen: Values, left: int) -> list[int]:
            axis, mask = next((axis, mask) for axis, mask in order if left & mask)
            options = [n for n in self.options[axis] if left >> n & 1]
            gained = gains(weights, options, chosen).tolist()
            if axis in self.prices.axes:
                base = self._gain(weights, chosen)
                rates = [(base + g) / self.prices.of([*chosen, o]) for g, o in zip(gained, options)]
            else:
                rates = gained
            ranked = sorted(range(len(options)), key=lambda i: (-rates[i], self.random()))
            return [options[i] for i in ranked]

        return self.constraints.complete(seed, best_first)

    def _climb(self, weights: NDArray[np.int64], row: Values) -> Values:
        """Return the row after changing single values as long as a change raises what it covers per second."""
        every = range(len(self.space))
        axis_of = {self.space.owners[value]: value for value in row}
        while True:
            row = tuple(axis_of.values())
            gained = gains(weights, every, row).tolist()
            total = sum(gained[value] for value in row) // self.strength
            price = self.prices.of(row)
            rates = []
            for value, own in enumerate(self.space.owners):
                old = axis_of[own]
                new_price = (
                    price if own not in self.prices.axes else self.prices.of([*(v for v in row if v != old), value])
                )
                rate = (total - gained[old] + gained[value]) / new_price
                if rate > total / price:
                    rates.append((-rate, value))
            chosen = bits(row)
            for _, value in sorted(rates):
                own = self.space.owners[value]
                if self.constraints.join(value, chosen & ~self.space.masks[own]):
                    axis_of[own] = value
                    break
            else:
                return tuple(sorted(row))


EXPENSIVE_FIRST = True
CLIMB_ALL = True


def covering_rows(
    axes: Axes,
    *,
    strength: int,
    rules: Iterable[Rule],
    given: Iterable[Row] = (),
    cost: Cost = EQUAL,
    until: float = 1.0,
) -> list[dict[str, Any]]:
    if strength > len(axes):
        raise ValueError(f"strength {strength} needs at least as many axes with several values; there are {len(axes)}")
    constraints = Constraints(Space(axes), rules)
    wanted = learn_possible(constraints, strength)
    builder = _Builder(constraints, strength, cost)
    left = wanted.members & ~seen(given, axes, strength).members
    rows = builder.rows(left, int((1 - until) * len(wanted)))
    return [constraints.space.row(row) for row in rows]
