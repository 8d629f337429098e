"""Construction of covering arrays: cheap rows with every possible combination of t values of different axes.

Most faults of software need no more than two or three factors to show (NIST SP 800-142, section 2), while all
combinations of a dozen axes would be millions of cells.

Rows are built one at a time as AETG does (Cohen, Dalal, Fredman, Patton 1997): some candidates grow value by value,
each time by the value that adds most, and the best candidate is kept. Here a candidate's worth is the weight that it
covers per estimated second of its run. covertable, which was tried, minimises the number of rows instead, while a row
on eight ranks costs as much as eight on two, and a compiled one as 25: by the same estimates 75 rows from here cost
three quarters of covertable's 80.
"""

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.covering_arrays.combinations import (
    Axes,
    Combinations,
    Constraints,
    Row,
    Rule,
    Space,
    Values,
    bits,
    contained,
    gains,
    learn_possible,
    numbers,
    seen,
    symmetric,
)
from reference_trainer.checks import UsageError

CANDIDATES = 8
"""Rows that are tried for each row of the array."""
REPLACED = 0.1
"""Share of the rows that a round replaces; with 0.25 and 0.5 the cost falls more slowly."""
TICKS_PER_S = 1000
"""Costs are whole milliseconds: sums of integers are the same on every machine."""


@dataclass(frozen=True)
class Cost:
    """Time that a row takes to run."""

    axes: Collection[str]
    """Axes on which the time depends."""
    seconds: Callable[[Row], float]
    """Time in s, more than 0, of a row with values of at least these axes."""


EQUAL = Cost((), lambda _: 1.0)
"""Cost with which the number of rows is minimised."""


def covering_rows(
    axes: Axes,
    *,
    strength: int,
    rules: Iterable[Rule],
    given: Iterable[Row] = (),
    kept: Iterable[Row] = (),
    cost: Cost = EQUAL,
    until: float = 1.0,
    rounds: int = 10,
) -> list[dict[str, Any]]:
    """Return rows with a value of each axis that, with the given rows, contain every possible combination of values.

    Deterministic: the same on every machine and version of Python. The rows are cheap, not a proven minimum.

    Args:
        axes: Values of each axis.
        strength: Number of values of a combination, of as many different axes.
        rules: Combinations that no row may have.
        given: Rows that are run anyway; they may lack axes, have values of none, and break rules.
        kept: Rows of an earlier array, so that a change of axes or rules changes few rows: those that are still allowed
            and needed stay, and no round replaces any.
        cost: Time that a row takes; the total is kept small.
        until: Share of the possible combinations at which to stop, those that cost least per combination first.
        rounds: Number of times that some rows are replaced, to keep the result if it is cheaper.

    Raises UsageError if there are fewer axes than `strength`, for an axis without values or with a value twice, and for
    a rule on so many axes that its combinations cannot be listed; ValueError for an `until` that is no share.
    """
    if strength > len(axes):
        raise UsageError(f"strength {strength} needs at least as many axes with several values; there are {len(axes)}")
    if not 0 <= until <= 1:
        raise ValueError(f"until = {until}: give a share of the combinations, from 0 to 1")
    constraints = Constraints(Space(axes), rules)
    old = constraints.complete_rows(kept)
    wanted = learn_possible(constraints, strength, old)
    missing = wanted - seen(given, axes, strength)
    builder = _Builder(constraints, missing, cost, equal_weights=until < 1)
    left = math.floor((1 - until) * len(wanted))
    rows = builder.completed(old, left, keep=True) if old else builder.array(rounds, left=left)
    return [constraints.space.row(row) for row in rows]


class _Prices:
    """Costs of rows in ms, each computed once."""

    def __init__(self, space: Space, cost: Cost) -> None:
        self._space, self._cost = space, cost
        self.axes = [axis for axis in space.axes if axis in set(cost.axes)]
        self._relevant = sum(space.masks[axis] for axis in self.axes)
        self._known: dict[int, int] = {}
        self._cheapest = {axis: numbers(space.masks[axis])[0] for axis in self.axes}
        for axis in self.axes:
            options = numbers(space.masks[axis])
            prices = [self.of(1 << value) for value in options]
            self._known.clear()  # computed with the former cheapest value of this axis
            self._cheapest[axis] = options[prices.index(min(prices))]

    def of(self, values: int) -> int:
        """Return the cost of values, given as bits; axes that have none of them have their cheapest value."""
        key = values & self._relevant
        if key not in self._known:
            chosen = self._cheapest | {self._space.owners[value]: value for value in numbers(key)}
            seconds = self._cost.seconds(self._space.row(chosen.values()))
            if seconds <= 0:
                raise ValueError(f"{self._space.row(chosen.values())} costs {seconds} s: give a time of more than 0")
            self._known[key] = max(1, round(seconds * TICKS_PER_S))
        return self._known[key]


class _Builder:
    """Builder of the rows of an array.

    The weight of a combination is the least cost of a row that contains it, which has to be paid once; with
    `equal_weights` the array may leave expensive combinations out.
    """

    def __init__(self, constraints: Constraints, wanted: Combinations, cost: Cost, *, equal_weights: bool) -> None:
        self._space, self._constraints = constraints.space, constraints
        self._wanted, self._strength = wanted, wanted.strength
        self.prices = _Prices(self._space, cost)
        self._random = random.Random(0).random  # of its methods the one whose stream never changes
        prices = [self.prices.of(0 if equal_weights else 1 << value) for value in range(len(self._space))]
        self._worth = np.array(prices, dtype=np.int64)
        for _ in range(self._strength - 1):
            self._worth = np.maximum(self._worth[..., None], prices)

    def array(self, rounds: int, *, left: int) -> list[Values]:
        """Return rows that contain all but at most `left` of the wanted combinations.

        Each round replaces some rows, chosen at random, which leads out of local optima (ruin and recreate).
        """
        rows = self.completed([], left)
        for _ in range(rounds):
            other = self.completed([row for row in rows if self._random() >= REPLACED], left)
            if self._cost(other) <= self._cost(rows):
                rows = other
        return rows

    def _cost(self, rows: Iterable[Values]) -> int:
        return sum(self.prices.of(bits(row)) for row in rows)

    def completed(self, rows: list[Values], left: int, *, keep: bool = False) -> list[Values]:
        """Return rows, and new ones until at most `left` combinations are missing: reduced, or with `keep` the needed.

        Needed rows have a wanted combination that no other row has, and keep all their values.
        """
        missing = self._wanted - contained(self._space, rows, self._strength)
        rows = [*rows, *self._add_rows(missing.members, left)]
        covered = self._wanted & contained(self._space, rows, self._strength)
        return (needed if keep else reduced)(rows, covered.members, self._constraints, self.prices.of)

    def _add_rows(self, wanted: NDArray[np.bool_], left: int) -> Iterator[Values]:
        """Yield rows until at most `left` of the wanted combinations are in none of them."""
        weights = np.where(symmetric(wanted), self._worth, 0)
        while len(seeds := np.argwhere(wanted & (weights > 0))) > left:
            chosen = [seeds[int(self._random() * len(seeds))].tolist() for _ in range(CANDIDATES)]
            rows = [self._climbed(weights, self._grown(weights, seed)) for seed in chosen]
            row = max(rows, key=lambda row: self._gain(weights, row) / self.prices.of(bits(row)))
            weights[np.ix_(*[row] * self._strength)] = 0
            yield row

    def _gain(self, weights: NDArray[np.int64], values: Values) -> int:
        return int(gains(weights, values, values).sum()) // self._strength

    def _grown(self, weights: NDArray[np.int64], seed: Values) -> Values:
        """Return a row grown from the values of the seed, each time by the value that gains most per cost."""
        order = sorted(self._space.masks.items(), key=lambda _: self._random())

        def best_first(chosen: Values, left: int) -> list[int]:
            axis, mask = next((axis, mask) for axis, mask in order if left & mask)
            options = numbers(left & mask)
            gain = self._gain(weights, chosen) if axis in self.prices.axes else 0
            row = bits(chosen)
            rates = {
                option: (gain + more) / self.prices.of(row | 1 << option)
                for option, more in zip(options, gains(weights, options, chosen).tolist(), strict=True)
            }
            return sorted(options, key=lambda option: (-rates[option], self._random()))

        return self._constraints.complete(seed, best_first)

    def _climbed(self, weights: NDArray[np.int64], row: Values) -> Values:
        """Return a row after the best change of a single value, again and again until none raises its gain per cost."""
        chosen = bits(row)
        while change := self._best_change(weights, chosen):
            chosen = change
        return numbers(chosen)

    def _best_change(self, weights: NDArray[np.int64], row: int) -> int:
        """Return the row with another value that gains most per cost; 0 if none gains more than the row does."""
        values = numbers(row)
        gained = gains(weights, range(len(self._space)), values).tolist()
        gain = sum(gained[value] for value in values) // self._strength
        rate = gain / self.prices.of(row)
        better = []
        for old in values:
            mask = self._space.masks[self._space.owners[old]]
            others = row & ~mask
            for value in numbers(mask & ~row):
                new = (gain - gained[old] + gained[value]) / self.prices.of(others | 1 << value)
                if new > rate:
                    better.append((-new, value, others))
        for _, value, others in sorted(better):
            if self._constraints.join(value, others):
                return others | 1 << value
        return 0


def reduced(
    rows: Iterable[Values], wanted: NDArray[np.bool_], constraints: Constraints, price: Callable[[int], int]
) -> list[Values]:
    """Return fewer or cheaper rows in which all wanted combinations occur that occur in `rows`.

    `wanted` is an array as in `Combinations`; `price` is the cost of the values that an integer has as bits.
    """
    array = _Array(rows, wanted, constraints, price)
    before, after = 0, array.cost()
    while after != before:
        array.sweep()
        before, after = after, array.cost()
    return [numbers(row) for row in array.rows]


def needed(
    rows: Iterable[Values], wanted: NDArray[np.bool_], constraints: Constraints, price: Callable[[int], int]
) -> list[Values]:
    """Return the rows without redundant ones, whose wanted combinations others have; arguments as for `reduced`."""
    array = _Array(rows, wanted, constraints, price)
    array.remove_superfluous()
    return [numbers(row) for row in array.rows]


class _Array:
    """Rows, as bits of their values, and how often each combination occurs in them."""

    def __init__(
        self, rows: Iterable[Values], wanted: NDArray[np.bool_], constraints: Constraints, price: Callable[[int], int]
    ) -> None:
        self.rows = [bits(row) for row in rows]
        self._strength, self._constraints, self._price = wanted.ndim, constraints, price
        self._masks, self._owners = constraints.space.masks, constraints.space.owners
        # A combination that need not be covered never counts as covered by a single row.
        self._times = np.where(symmetric(wanted), 0, 2).astype(np.int32)
        for row in self.rows:
            self._count(row, 1)
        self._slack = [0] * len(self.rows)

    def cost(self) -> int:
        """Return the cost of all rows."""
        return sum(map(self._price, self.rows))

    def sweep(self) -> None:
        """Remove or cheapen rows, the most expensive first."""
        self._slack = [self._slack_of(row) for row in self.rows]
        for row in sorted(self.rows, key=lambda row: (-self._price(row), row)):
            if row in self.rows and not self._merge_into_others(row):
                self._cheapen(row)

    def remove_superfluous(self) -> None:
        """Remove rows without a unique combination, the most expensive first."""
        for row in sorted(self.rows, key=lambda row: (-self._price(row), row)):
            if self._slack_of(row) == row:
                self.rows.remove(row)
                self._count(row, -1)

    def _block(self, row: int) -> tuple[NDArray[np.intp], ...]:
        """Return the index of the combinations of a row's values."""
        return np.ix_(*[numbers(row)] * self._strength)

    def _count(self, row: int, change: int) -> None:
        self._times[self._block(row)] += change

    def _slack_of(self, row: int) -> int:
        """Return the values of a row, as bits, that are in none of its unique combinations."""
        needed = (self._times[self._block(row)] == 1).any(axis=tuple(range(1, self._strength)))
        return bits(value for value, need in zip(numbers(row), needed.tolist(), strict=True) if not need)

    def _covered_only_by(self, row: int) -> list[Values]:
        """Return the combinations that no other row covers."""
        values = np.array(numbers(row))
        needed = values[np.argwhere(self._times[self._block(row)] == 1)]
        return [tuple(combination) for combination in needed.tolist() if sorted(combination) == combination]

    def _replace(self, index: int, row: int) -> None:
        self._count(self.rows[index], -1)
        self._count(row, 1)
        self.rows[index], self._slack[index] = row, self._slack_of(row)

    def _cheapen(self, row: int) -> None:
        """Change slack values of the row as long as that makes it cheaper."""
        index = self.rows.index(row)
        while cheaper := [
            new
            for new in self._with_other_values(row, numbers(self._slack_of(row)))
            if self._price(new) < self._price(row)
        ]:
            row = min(cheaper, key=lambda new: (self._price(new), new))
            self._replace(index, row)

    def _with_other_values(self, row: int, values: Sequence[int]) -> list[int]:
        """Return the allowed rows that differ in one of the values."""
        masks = [self._masks[self._owners[value]] for value in values]
        return [
            row & ~mask | 1 << other
            for mask in masks
            for other in numbers(mask & ~row)
            if self._constraints.join(other, row & ~mask)
        ]

    def _merge_into_others(self, row: int) -> bool:
        """Drop a row whose unique combinations fit more cheaply into other rows; return True if dropped."""
        times, rows, slack = self._times.copy(), self.rows.copy(), self._slack.copy()
        unique = self._covered_only_by(row)
        index = self.rows.index(row)
        del self.rows[index], self._slack[index]
        self._count(row, -1)
        limit = self.cost() + self._price(row)
        for combination in unique:
            # The row that took another combination may contain this one, too.
            if not self._times[combination] and not self._take(combination, limit - self.cost()):
                self._times, self.rows, self._slack = times, rows, slack
                return False
        return True

    def _take(self, combination: Values, limit: int) -> bool:
        """Put a combination into the row that takes it most cheaply, for less than `limit`; return whether one does."""
        mask, added = bits(combination), 0
        for value in combination:
            added |= self._masks[self._owners[value]]
        offers = []
        for index, row in enumerate(self.rows):
            if not row & added & ~mask & ~self._slack[index]:
                more = self._price(row & ~added | mask) - self._price(row)
                if more < limit:
                    offers.append((more, index))
        for _, index in sorted(offers):
            row = self.rows[index]
            new = row & ~added | mask
            if all(self._constraints.join(value, new) for value in combination):
                self._slack[index] = self._slack_of(row)
                if not row & ~new & ~self._slack[index]:
                    self._replace(index, new)
                    return True
        return False
