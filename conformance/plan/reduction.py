"""Reduction of covering arrays: rows that others can do without, and values that make a row dear for nothing."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from conformance.plan.combinations import Constraints, Values, bits, numbers, symmetric


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
    """Return the rows without those of which others have each wanted combination; arguments as for `reduced`."""
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
        self._spare = [0] * len(self.rows)

    def cost(self) -> int:
        """Return the cost of all rows."""
        return sum(map(self._price, self.rows))

    def sweep(self) -> None:
        """Remove or cheapen rows, the most expensive first."""
        self._spare = [self._spare_values(row) for row in self.rows]
        for row in sorted(self.rows, key=lambda row: (-self._price(row), row)):
            if row in self.rows and not self._absorb(row):
                self._cheapen(row)

    def remove_superfluous(self) -> None:
        """Remove rows that cover nothing alone, the most expensive first."""
        for row in sorted(self.rows, key=lambda row: (-self._price(row), row)):
            if self._spare_values(row) == row:
                self.rows.remove(row)
                self._count(row, -1)

    def _block(self, row: int) -> tuple[NDArray[np.intp], ...]:
        """Return the index of the combinations of a row's values."""
        return np.ix_(*[numbers(row)] * self._strength)

    def _count(self, row: int, change: int) -> None:
        self._times[self._block(row)] += change

    def _spare_values(self, row: int) -> int:
        """Return the values of a row that are in no combination that it alone covers."""
        needed = (self._times[self._block(row)] == 1).any(axis=tuple(range(1, self._strength)))
        return bits(value for value, need in zip(numbers(row), needed.tolist(), strict=True) if not need)

    def _alone(self, row: int) -> list[Values]:
        """Return the combinations that no other row covers."""
        values = np.array(numbers(row))
        needed = values[np.argwhere(self._times[self._block(row)] == 1)]
        return [tuple(combination) for combination in needed.tolist() if sorted(combination) == combination]

    def _replace(self, index: int, row: int) -> None:
        self._count(self.rows[index], -1)
        self._count(row, 1)
        self.rows[index], self._spare[index] = row, self._spare_values(row)

    def _cheapen(self, row: int) -> None:
        """Change values that the row can spare as long as that makes it cheaper."""
        index = self.rows.index(row)
        while cheaper := [
            new
            for new in self._with_other_values(row, numbers(self._spare_values(row)))
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

    def _absorb(self, row: int) -> bool:
        """Remove a row if others can take what it alone covers, for less than it costs; return whether they could."""
        times, rows, spare = self._times.copy(), self.rows.copy(), self._spare.copy()
        alone = self._alone(row)
        index = self.rows.index(row)
        del self.rows[index], self._spare[index]
        self._count(row, -1)
        limit = self.cost() + self._price(row)
        for combination in alone:
            # A row that has taken another combination may have this one as well.
            if not self._times[combination] and not self._take(combination, limit - self.cost()):
                self._times, self.rows, self._spare = times, rows, spare
                return False
        return True

    def _take(self, combination: Values, limit: int) -> bool:
        """Change the row that can take a combination for the least, if for less than `limit`; return success."""
        mask, added = bits(combination), 0
        for value in combination:
            added |= self._masks[self._owners[value]]
        offers = []
        for index, row in enumerate(self.rows):
            if not row & added & ~mask & ~self._spare[index]:
                more = self._price(row & ~added | mask) - self._price(row)
                if more < limit:
                    offers.append((more, index))
        for _, index in sorted(offers):
            row = self.rows[index]
            new = row & ~added | mask
            if all(self._constraints.join(value, new) for value in combination):
                self._spare[index] = self._spare_values(row)
                if not row & ~new & ~self._spare[index]:
                    self._replace(index, new)
                    return True
        return False
