"""Coverage: combinations of axis values that laws on numbers see, and cells that laws leave out.

A combination is possible if a cell can have it: exclusions decide, exactly. It is seen if a cell has it on which a law
judges the numbers of the run.
"""

import itertools
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import msgspec
import numpy as np
from msgspec.structs import asdict, replace

from conformance.covering_arrays.combinations import Combinations, Constraints, Space, learn_possible, possible, seen
from conformance.plan.cells import AxisValue, Cell, axis_default, axis_value
from conformance.plan.content import Content, Exclusion
from conformance.plan.matrix import Matrix
from conformance.plan.scopes import Scope
from conformance.plan.selection import Facts

Pair = Mapping[str, AxisValue]
"""Values of two axes, by axis."""
_MAX_TOGETHER = 2
"""Number of exclusions that are named as the reason of an impossible pair."""


class Tally(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of seen and of possible combinations."""

    seen: int
    possible: int

    @property
    def share(self) -> float:
        """Share that is seen; 1 if nothing is possible."""
        return self.seen / self.possible if self.possible else 1.0


class CombinationCoverage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coverage of the combinations of two, or of three, values of different axes."""

    values: Tally
    """Combinations of any values."""
    features: Tally
    """Combinations of values none of which is its axis's default."""
    axes: dict[str, Tally]
    """Combinations with a value of this axis."""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cells in the MUST of a law that it cannot judge yet."""

    where: str
    """Selection of the cells."""
    reason: str
    cells: int
    """Number of these cells; a cell counts for the first gap that has it."""


class LawCoverage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cells in the MUST of a law."""

    pairs: int | None
    """Number of possible pairs of values in the cells that the law judges; null if it judges no numbers."""
    cells: int
    """Number of cells of the profile in the MUST."""
    judged: int
    """Number of these that the law judges, or in a session has judged."""
    left_out: list[LeftOut]
    """Cells that the law leaves out, by reason, the most frequent reason first."""

    @property
    def pending(self) -> int:
        """Number of cells that the law can judge and has not: unsupported, not selected, or without a result."""
        return self.cells - self.judged - sum(gap.cells for gap in self.left_out)


class Coverage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coverage of a profile, or of a session."""

    pairs: CombinationCoverage
    triples: CombinationCoverage
    laws: dict[str, LawCoverage]
    """Laws that have a cell in the profile, by id."""


_NOTHING = CombinationCoverage(values=Tally(0, 0), features=Tally(0, 0), axes={})


@dataclass(frozen=True)
class Covered:
    """Possible combinations of some number of values, and the seen ones among them."""

    possible: Combinations
    seen: Combinations

    @cached_property
    def missing(self) -> list[dict[str, AxisValue]]:
        """Combinations that are possible and not seen, each as values by axis."""
        return list(self.possible - self.seen)

    def counts(self) -> CombinationCoverage:
        """Return the numbers of combinations."""
        owners = self.possible.space.owners
        features = [number for number in range(len(owners)) if _is_feature(self.possible.space, number)]
        return CombinationCoverage(
            values=self._among(range(len(owners))),
            features=self._among(features),
            axes={axis: self._with(axis) for axis in self.possible.space.axes},
        )

    def _among(self, values: Sequence[int]) -> Tally:
        """Count combinations of these values alone."""
        return Tally(*(_count_among(each, values) for each in (self.seen, self.possible)))

    def _with(self, axis: str) -> Tally:
        """Count combinations with a value of an axis; none has two of them."""
        values = [number for number, owner in enumerate(self.possible.space.owners) if owner == axis]
        return Tally(*(int(each.uses[values].sum()) for each in (self.seen, self.possible)))


@dataclass(frozen=True)
class Impossible:
    """Pairs that no cell can have."""

    exclusions: tuple[Exclusion, ...]
    """Smallest set of exclusions that leaves none; empty if more than two are needed."""
    pairs: Sequence[Pair]


def coverage(matrix: Matrix, cells: Sequence[Cell], *, judged: Container[tuple[str, str]] | None = None) -> Coverage:
    """Return the coverage of cells of the matrix; without cells, as of other people's trainers, nothing is possible.

    `judged` are the law and the id of the cell of the cases that have been judged. Without it all cases are.
    """
    if not cells:
        return Coverage(pairs=_NOTHING, triples=_NOTHING, laws={})
    laws = laws_on(matrix, cells, judged=judged)
    numeric = on_numbers(matrix, laws)
    pairs, triples = (_seen(allowed, numeric) for allowed in _possible_pairs_and_triples(matrix))
    facts = {cell: cell.facts() for cell in laws}
    coverage_by_law = {
        law: _law_coverage(scope, facts, [cell for cell in laws if law in laws[cell]], pairs)
        for law, scope in matrix.scopes.items()
    }
    spoken_of = {law: each for law, each in coverage_by_law.items() if each.cells}
    return Coverage(pairs=pairs.counts(), triples=triples.counts(), laws=spoken_of)


def laws_on(
    matrix: Matrix, cells: Iterable[Cell], *, judged: Container[tuple[str, str]] | None = None
) -> dict[Cell, list[str]]:
    """Return the laws that hold on each cell; with `judged`, only those that have judged it."""
    return {cell: [law for law in matrix.laws_on(cell) if judged is None or (law, cell.id) in judged] for cell in cells}


def on_numbers(matrix: Matrix, laws: Mapping[Cell, Iterable[str]]) -> list[Cell]:
    """Return the cells, given with their laws, that have a law on numbers."""
    return [cell for cell, holding in laws.items() if any(matrix.scopes[law].numbers for law in holding)]


@cache
def _possible_pairs_and_triples(matrix: Matrix) -> list[Combinations]:
    """Return the possible combinations of two and of three values; the cells of the matrix have most of them."""
    axes = _axes(matrix.content)
    constraints = Constraints(Space(axes), matrix.content.rules(axes))
    known = constraints.complete_rows(map(asdict, matrix.cells.values()))
    return [learn_possible(constraints, strength, known) for strength in (2, 3)]


def covered(content: Content, cells: Iterable[Cell], strength: int) -> Covered:
    """Return the possible combinations of `strength` values of the matrix's axes, and those that the cells have."""
    axes = _axes(content)
    return _seen(possible(axes, strength=strength, rules=content.rules(axes)), cells)


def impossible_pairs(content: Content) -> list[Impossible]:
    """Return the pairs of values that no cell can have, by the exclusions that make them so."""
    axes = _axes(content)
    left = {_key(pair): pair for pair in _excluded(content, axes)}
    found = []
    for number in range(1, _MAX_TOGETHER + 1):
        for exclusions in itertools.combinations(content.exclusions, number):
            near = {axis: values for axis, values in axes.items() if any(axis in rule.axes for rule in exclusions)}
            if not _share_an_axis(exclusions) or not all(rule.affects(near) for rule in exclusions):
                continue
            excluded = map(_key, _excluded(replace(content, exclusions=list(exclusions)), near))
            if pairs := [left.pop(key) for key in excluded if key in left]:
                found.append(Impossible(exclusions, pairs))
    return [*found, Impossible((), list(left.values()))] if left else found


def _axes(content: Content) -> dict[str, list[AxisValue]]:
    """Return the combined axes, with values of the types of `Cell`, since `seen` compares types."""
    return {axis: [axis_value(axis, value) for value in values] for axis, values in content.axes.items()}


def _seen(allowed: Combinations, cells: Iterable[Cell]) -> Covered:
    return Covered(allowed, allowed & seen(map(asdict, cells), allowed.space.axes, allowed.strength))


def _is_feature(space: Space, number: int) -> bool:
    ((axis, value),) = space.row([number]).items()
    return bool(value != axis_default(axis))


def _count_among(combinations: Combinations, values: Sequence[int]) -> int:
    return int(np.count_nonzero(combinations.members[np.ix_(*[list(values)] * combinations.strength)])) if values else 0


def _excluded(content: Content, axes: dict[str, list[AxisValue]]) -> Iterable[dict[str, AxisValue]]:
    """Return the pairs of values for which the exclusions leave no cell."""
    allowed = possible(axes, strength=2, rules=content.rules(axes))
    return Combinations(allowed.space, allowed.space.combinations(2)) - allowed


def _share_an_axis(exclusions: Sequence[Exclusion]) -> bool:
    """Return True if each exclusion shares an axis with the one before; without that they exclude nothing together."""
    return all(first.axes & second.axes for first, second in itertools.pairwise(exclusions))


def _key(pair: Pair) -> tuple[tuple[str, str, AxisValue], ...]:
    """Return a key of a pair; `True` and `1` are different values."""
    return tuple((axis, type(value).__name__, value) for axis, value in sorted(pair.items()))


def _law_coverage(scope: Scope, facts: Mapping[Cell, Facts], judged: Sequence[Cell], pairs: Covered) -> LawCoverage:
    spoken_of = [cell_facts for cell_facts in facts.values() if scope.where.holds(cell_facts)]
    return LawCoverage(
        pairs=len(_seen(pairs.possible, judged).seen) if scope.numbers else None,
        cells=len(spoken_of),
        judged=len(judged),
        left_out=_left_out(scope, spoken_of),
    )


def _left_out(scope: Scope, spoken_of: Iterable[Facts]) -> list[LeftOut]:
    gaps = Counter(gap for facts in spoken_of if (gap := scope.gap(facts)) is not None)
    return [LeftOut(where=gap.cells, reason=gap.reason, cells=cells) for gap, cells in gaps.most_common()]
