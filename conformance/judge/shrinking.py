"""Shrinking: from a cell on which a law fails to the smallest one, by resetting axes to their defaults.

Nothing is run here: an oracle answers whether the law fails with the same symptoms on a cell. If the failing cells are
those with a certain set of features, the result has exactly this set, found with about log2(n) questions for each
feature of the set among n.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from conformance.plan.cells import AxisValue, Cell, axis_default, axis_names
from conformance.plan.mesh import Mesh

Fails = Callable[[Cell], bool | None]
"""Function that returns whether the law fails with the same symptoms on a cell; None if it cannot be judged there.

Raises SearchEnded to end the search."""
_SMALL_WORLD = 2


class SearchEnded(Exception):
    """The oracle answers no more questions; the smallest cell so far is the result."""


class Shrunk(msgspec.Struct, frozen=True, kw_only=True):
    """Smallest cell on which a law was seen to fail."""

    cell: Cell
    features: dict[str, AxisValue]
    """Minimal non-default values, the mesh included: resetting any one of them removes or changes the failure."""
    required: dict[str, AxisValue]
    """Non-default values forced by exclusions or by the law's scope; not part of the cause."""
    neighbours: tuple[Cell, ...]
    """Cells without one of the features, on which the law was judged and does not fail with the same symptoms."""
    complete: bool
    """False if the search ended early: then the law may fail without some of the features."""


def shrink(cell: Cell, fails: Fails, *, meshes: Sequence[str], guesses: Sequence[Cell] = ()) -> Shrunk:
    """Return the smallest cell on which a law fails as it is known to fail on `cell`.

    `meshes` are the meshes that may replace that of the cell. `guesses` are cells that may be close to the result: they
    are tried first, if `cell` has all their features.
    """
    search = _Search(cell, fails, meshes)
    complete = True
    try:
        search.take_any(guess for guess in guesses if _is_smaller(guess, cell, meshes))
        search.take_any(small for small in search.on_other_meshes() if small.world_size <= _SMALL_WORLD)
        search.bisect()
        search.reset_one_by_one()
    except SearchEnded:
        complete = False
    return search.result(complete=complete)


def features_of(cell: Cell) -> dict[str, AxisValue]:
    """Return the values of a cell that are not those of the default cell, by axis and without the seed."""
    values = msgspec.structs.asdict(cell)
    return {name: values[name] for name in axis_names() if name != "seed" and values[name] != axis_default(name)}


def with_only(cell: Cell, features: Mapping[str, AxisValue]) -> Cell:
    """Return the cell with these features alone, on its mesh unless `features` has another one, with its seed."""
    return Cell(**{"mesh": cell.mesh, "seed": cell.seed} | dict(features))  # type: ignore[arg-type]


def smaller_meshes(mesh: str, meshes: Sequence[str]) -> list[str]:
    """Return the default mesh, and those of `meshes` that are larger in no dimension: the fewest ranks first."""
    own, default = Mesh.parse(mesh), Mesh.parse(str(axis_default("mesh")))
    if own == default or own.world_size < default.world_size:
        return []
    others = sorted((Mesh.parse(other) for other in meshes), key=lambda other: other.world_size)
    within = [other for other in others if other != own and _fits(other, own)]
    return list(dict.fromkeys(other.name for other in (default, *within)))


def _fits(mesh: Mesh, other: Mesh) -> bool:
    """Return whether a mesh is larger than another one in no dimension."""
    return all(getattr(mesh, name) <= getattr(other, name) for name in mesh.__struct_fields__)


def _is_smaller(guess: Cell, cell: Cell, meshes: Sequence[str]) -> bool:
    """Return whether resets lead from the cell to a guess, which is another cell."""
    own, features = features_of(cell), _without(features_of(guess), "mesh")
    reachable = guess.mesh in (cell.mesh, *smaller_meshes(cell.mesh, meshes)) and guess.seed == cell.seed
    return guess != cell and reachable and all(own.get(name) == value for name, value in features.items())


class _Search:
    """Search with the smallest cell so far, and all answers."""

    def __init__(self, cell: Cell, fails: Fails, meshes: Sequence[str]) -> None:
        self._cell, self._fails, self._meshes = cell, fails, meshes
        self._answers: dict[Cell, bool | None] = {cell: True}

    def answer(self, cell: Cell) -> bool | None:
        """Return whether the law fails on a cell, which is asked once."""
        if cell not in self._answers:
            self._answers[cell] = self._fails(cell)
        return self._answers[cell]

    def take_any(self, candidates: Iterator[Cell]) -> bool:
        """Take the first candidate on which the law fails; returns whether there was one."""
        found = next((candidate for candidate in candidates if self.answer(candidate)), None)
        self._cell = found or self._cell
        return found is not None

    def bisect(self) -> None:
        """Find the needed features by bisection, the last one first.

        A cell that cannot be judged counts as one that does not fail: each feature comes after those that it requires.
        """
        cell = self._cell
        features = _without(features_of(cell), "mesh")
        needed, undecided = dict[str, AxisValue](), list(features)
        while undecided and not self.take_any(iter([with_only(cell, needed)])):
            without, sufficient = 0, len(undecided)
            while sufficient - without > 1:
                middle = (without + sufficient) // 2
                first = {name: features[name] for name in undecided[:middle]}
                if self.take_any(iter([with_only(cell, first | needed)])):
                    sufficient = middle
                else:
                    without = middle
            last = undecided[sufficient - 1]
            needed[last] = features[last]
            undecided = undecided[: sufficient - 1]

    def reset_one_by_one(self) -> None:
        """Reset one axis, or two where one alone cannot be reset, as long as the law still fails."""
        while self.take_any(self._resets()):
            pass

    def on_other_meshes(self) -> Iterator[Cell]:
        """Yield the cell on smaller meshes, the fewest ranks first."""
        yield from (self._cell.but(mesh=mesh) for mesh in smaller_meshes(self._cell.mesh, self._meshes))

    def _resets(self) -> Iterator[Cell]:
        """Yield the candidates for the next reset, single ones first."""
        features = list(_without(features_of(self._cell), "mesh"))
        yield from self._alone(features)
        stuck = [name for name in features if self.answer(self._without(name)) is None]
        for name in stuck:
            yield from (self._without(name, other) for other in features if other != name)
        for cell in list(self.on_other_meshes()):
            if self.answer(cell) is None:
                yield from (cell.but(**{name: axis_default(name)}) for name in features)

    def _alone(self, features: Sequence[str]) -> Iterator[Cell]:
        yield from (self._without(name) for name in features)
        yield from self.on_other_meshes()

    def _without(self, *names: str) -> Cell:
        return self._cell.but(**{name: axis_default(name) for name in names})

    def result(self, *, complete: bool) -> Shrunk:
        """Return the smallest cell so far, with its features."""
        features = features_of(self._cell)
        without = {name: self._lacking(name) for name in features}
        required = [name for name, cells in without.items() if all(self._answers.get(c, False) is None for c in cells)]
        return Shrunk(
            cell=self._cell,
            features={name: value for name, value in features.items() if name not in required},
            required={name: features[name] for name in required},
            neighbours=tuple(c for cells in without.values() for c in cells if self._answers.get(c) is False),
            complete=complete,
        )

    def _lacking(self, name: str) -> list[Cell]:
        """Return the cells with this axis reset, whether the law was judged there or not."""
        return list(self.on_other_meshes()) if name == "mesh" else [self._without(name)]


def _without(features: Mapping[str, AxisValue], name: str) -> dict[str, AxisValue]:
    return {axis: value for axis, value in features.items() if axis != name}
