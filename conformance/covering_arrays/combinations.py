"""Combinations of the values of different axes: all that rules leave possible, and those that rows contain.

Values of all axes are numbered through, axis after axis. A set of combinations of `t` values is then a boolean array
with `t` dimensions, and a set of values, such as a row or the values still open, is the bits of an integer.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference_trainer.checks import UsageError

Row = Mapping[str, Any]
Axes = Mapping[str, Sequence[Any]]
Values = tuple[int, ...]
"""Numbers of values of different axes, ascending."""

MAX_RULE_TABLE = 1_000_000


@dataclass(frozen=True)
class Rule:
    """Combinations of values that no row may have."""

    axes: Collection[str]
    """Axes on which the rule depends."""
    forbids: Callable[[Row], bool]
    """Predicate on a row with values of at least these axes."""


class Space:
    """Numbering of the values of axes.

    Raises UsageError for an axis without values or with a value twice.
    """

    def __init__(self, axes: Axes) -> None:
        self.axes = {axis: tuple(values) for axis, values in axes.items()}
        self.owners = [axis for axis, values in self.axes.items() for _ in values]
        """Axis of each value."""
        self._values = [value for values in self.axes.values() for value in values]
        # True and 1 are different values of an axis.
        self._numbers = {
            (axis, type(value), value): number
            for number, (axis, value) in enumerate(zip(self.owners, self._values, strict=True))
        }
        empty = [axis for axis, values in self.axes.items() if not values]
        if empty or len(self._numbers) < len(self._values):
            raise UsageError(f"an axis needs values, each once: correct {', '.join(empty or self._repeated())}")

    def __len__(self) -> int:
        return len(self._values)

    def _repeated(self) -> list[str]:
        return [axis for axis, values in self.axes.items() if len({(type(v), v) for v in values}) < len(values)]

    @cached_property
    def masks(self) -> dict[str, int]:
        """Bits of the values of each axis."""
        masks = dict.fromkeys(self.axes, 0)
        for number, axis in enumerate(self.owners):
            masks[axis] |= 1 << number
        return masks

    def values(self, row: Row) -> Values:
        """Return the numbers of a row's values; values that no axis has are left out."""
        known = (self._numbers.get((axis, type(row[axis]), row[axis])) for axis in self.axes if axis in row)
        return tuple(number for number in known if number is not None)

    def row(self, values: Iterable[int]) -> dict[str, Any]:
        """Return values by axis."""
        return {self.owners[number]: self._values[number] for number in values}

    def combinations(self, strength: int) -> NDArray[np.bool_]:
        """Return the array of all combinations of `strength` values of different axes; numbers ascend."""
        owner = np.array([list(self.axes).index(axis) for axis in self.owners])
        members = np.ones((len(self),) * strength, dtype=bool)
        for left, right in itertools.pairwise(range(strength)):
            members &= _along(owner, left, strength) < _along(owner, right, strength)
        return members


def _along(vector: NDArray[Any], dimension: int, dimensions: int) -> NDArray[Any]:
    """Return a vector as an array with `dimensions` dimensions that varies along one of them."""
    return vector.reshape([-1 if index == dimension else 1 for index in range(dimensions)])


@dataclass(frozen=True, eq=False)
class Combinations:
    """Set of combinations of values of `strength` different axes."""

    space: Space
    members: NDArray[np.bool_]
    """Array with `strength` dimensions of the number of values; only ascending numbers are True."""

    @property
    def strength(self) -> int:
        """Number of values of a combination."""
        return self.members.ndim

    @cached_property
    def uses(self) -> NDArray[np.int64]:
        """Number of combinations that have each value."""
        along = [tuple(other for other in range(self.strength) if other != own) for own in range(self.strength)]
        uses: NDArray[np.int64] = np.sum([self.members.sum(axis=others) for others in along], axis=0)
        return uses

    def __len__(self) -> int:
        return int(np.count_nonzero(self.members))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.space.row(values) for values in np.argwhere(self.members).tolist())

    def __and__(self, other: "Combinations") -> "Combinations":
        return Combinations(self.space, self.members & other.members)

    def __sub__(self, other: "Combinations") -> "Combinations":
        return Combinations(self.space, self.members & ~other.members)


class Constraints:
    """Search for rows that no rule forbids.

    A rule is a set of nogoods: combinations of values that no row may contain. Raises UsageError for a rule on so many
    axes that its combinations are too many to be listed.
    """

    def __init__(self, space: Space, rules: Iterable[Rule]) -> None:
        self.space = space
        self._masks = list(space.masks.values())
        self._excluded = 0
        self._clashes = [space.masks[axis] & ~(1 << number) for number, axis in enumerate(space.owners)]
        self._larger: list[list[int]] = [[] for _ in space.owners]
        for rule in rules:
            for nogood in _nogoods(space, rule):
                self.forbid(nogood)

    def forbid(self, values: Values) -> None:
        """Add a nogood."""
        if len(values) == 1:
            self._excluded |= 1 << values[0]
        elif len(values) == 2:
            for value, other in (values, values[::-1]):
                self._clashes[value] |= 1 << other
        else:
            for value in values:
                self._larger[value].append(bits(values))

    def allow(self, values: Iterable[int]) -> bool:
        """Return whether values contain no nogood."""
        chosen = bits(values)
        return all(self.join(value, chosen) for value in numbers(chosen))

    def complete_rows(self, rows: Iterable[Row]) -> list[Values]:
        """Return the values of the rows that have one of each axis and contain no nogood."""
        numbered = map(self.space.values, rows)
        return [values for values in numbered if len(values) == len(self.space.axes) and self.allow(values)]

    def join(self, value: int, chosen: int) -> bool:
        """Return True if no nogood consists of this value and chosen ones."""
        if self._excluded >> value & 1 or self._clashes[value] & chosen:
            return False
        chosen |= 1 << value
        return all(nogood & ~chosen for nogood in self._larger[value])

    def complete(self, values: Iterable[int], choose: Callable[[Values, int], Iterable[int]] | None = None) -> Values:
        """Return a row that contains the values and no nogood; the empty tuple if there is none.

        `choose(chosen, open)` returns values of one axis, best first, to try next: some of the bits `open`. Default:
        the values of the axis that has the fewest left.
        """
        domain = ((1 << len(self.space)) - 1) & ~self._excluded
        chosen = 0
        for value in values:
            if not domain >> value & 1:
                return ()
            domain, chosen = self._narrow(domain, chosen, value)
            if not domain:
                return ()
        return self._search(domain, chosen, choose or self.fewest)

    def _search(self, domain: int, chosen: int, choose: Callable[[Values, int], Iterable[int]]) -> Values:
        if domain == chosen:
            return numbers(chosen)
        for value in choose(numbers(chosen), domain & ~chosen):
            narrowed, grown = self._narrow(domain, chosen, value)
            row = self._search(narrowed, grown, choose) if narrowed else ()
            if row:
                return row
        return ()

    def fewest(self, chosen: Values, undecided: int) -> Values:
        """Return the values left of the axis that has the fewest, at least two."""
        del chosen
        return numbers(min((undecided & mask for mask in self._masks if undecided & mask), key=int.bit_count))

    def _narrow(self, domain: int, chosen: int, value: int) -> tuple[int, int]:
        """Return the values left and the chosen ones after choosing a value that is left; no value left: a dead end.

        An axis with a single value left has it chosen as well (unit propagation).
        """
        forced = 1 << value
        while forced:
            value = forced.bit_length() - 1
            chosen |= 1 << value
            domain &= ~self._clashes[value]
            for nogood in self._larger[value]:
                rest = nogood & ~chosen
                if not rest & (rest - 1):
                    domain &= ~rest
            forced = 0
            for mask in self._masks:
                left = domain & mask
                if not left:
                    return 0, 0
                if not left & (left - 1) and not left & chosen:
                    forced = left
        return domain, chosen


def bits(values: Iterable[int]) -> int:
    """Return an integer with the bits of these numbers set."""
    return sum(1 << value for value in values)


def numbers(mask: int) -> Values:
    """Return the positions of the bits that are set, ascending."""
    positions = []
    while mask:
        lowest = mask & -mask
        positions.append(lowest.bit_length() - 1)
        mask ^= lowest
    return tuple(positions)


def _nogoods(space: Space, rule: Rule) -> list[Values]:
    """Return the combinations of values of its axes that a rule forbids."""
    axes = [axis for axis in space.axes if axis in set(rule.axes)]
    options = [numbers(space.masks[axis]) for axis in axes]
    size = int(np.prod([len(values) for values in options], dtype=float))
    if size > MAX_RULE_TABLE:
        raise UsageError(f"a rule on {', '.join(axes)} has {size} combinations: split it, at most {MAX_RULE_TABLE}")
    return [values for values in itertools.product(*options) if rule.forbids(space.row(values))]


def learn_possible(constraints: Constraints, strength: int, rows: Collection[Values] = ()) -> Combinations:
    """Return the combinations of `strength` values that a row can have; the impossible ones become nogoods.

    Exact. A combination is impossible if it contains an impossible one of fewer values. Each row that the search meets
    proves all its combinations possible, as do `rows`, which have no nogood, so that few need a separate search.
    """
    space = constraints.space
    members = space.combinations(strength)
    if strength > 1:
        smaller = learn_possible(constraints, strength - 1, rows).members
        for left_out in range(strength):
            members &= np.expand_dims(smaller, left_out)
    undecided = symmetric(members)
    for row in rows:
        undecided[np.ix_(*[row] * strength)] = False

    def most_undecided(chosen: Values, left: int) -> Values:
        options = constraints.fewest(chosen, left)
        gained = gains(undecided, options, chosen)
        return tuple(options[index] for index in np.argsort(-gained, kind="stable"))

    for values in map(tuple, np.argwhere(members & undecided).tolist()):
        if not undecided[values]:
            continue
        row = constraints.complete(values, most_undecided) if constraints.allow(values) else ()
        undecided[np.ix_(*[row or values] * strength)] = False
        if not row:
            members[values] = False
            constraints.forbid(values)
    return Combinations(space, members)


def symmetric(members: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return an array of combinations in which their values may be in any order."""
    either = members.copy()
    for order in itertools.permutations(range(members.ndim)):
        either |= members.transpose(order)
    return either


def gains(weights: NDArray[Any], options: Sequence[int], chosen: Sequence[int]) -> NDArray[np.int64]:
    """Return the weight of the combinations of each option with chosen values of other axes; `weights` is symmetric."""
    dimensions = weights.ndim
    along = [_along(np.array(options if index == 0 else chosen), index, dimensions) for index in range(dimensions)]
    total: NDArray[np.int64] = weights[tuple(along)].sum(axis=tuple(range(1, dimensions)), dtype=np.int64)
    return total // math.factorial(dimensions - 1)


def possible(axes: Axes, *, strength: int, rules: Iterable[Rule]) -> Combinations:
    """Return the combinations that a row of all axes can have without being forbidden; exact."""
    return learn_possible(Constraints(Space(axes), rules), strength)


def seen(rows: Iterable[Row], axes: Axes, strength: int) -> Combinations:
    """Return the combinations of values of the axes that rows contain; rows may lack axes or have other values."""
    space = Space(axes)
    return contained(space, (space.values(row) for row in rows), strength)


def contained(space: Space, rows: Iterable[Values], strength: int) -> Combinations:
    """Return the combinations of the values of rows."""
    members = np.zeros((len(space),) * strength, dtype=bool)
    for row in rows:
        members[np.ix_(*[row] * strength)] = True
    return Combinations(space, members & space.combinations(strength))
