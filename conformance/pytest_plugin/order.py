"""Selection of a session's cases by shard, and the order in which the cases run."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pytest

from conformance.plan.cells import Cell
from conformance.plan.matrix import Case
from conformance.report.schema import CaseResult
from reference_trainer.checks import UsageError

_FIRST = ("ENV-1", "ENV-2", "ENV-3", "ENV-4")
"""Preconditions, judged first, on few cells."""
_CACHE_KEY = "conformance/durations_of_cases_s"


@dataclass(frozen=True)
class Shard:
    """Shard number `index`, counted from 1, of the `count` shards of a profile: `--shard I/N`."""

    index: int
    count: int

    def of(self, cases: Sequence[Case]) -> tuple[Case, ...]:
        """Return the cases of each `count`-th cell.

        All cases of a cell stay together, since they share its run; similar cells, which are neighbours in the matrix,
        are spread over the shards. Raises UsageError if there are fewer cells than shards.
        """
        cells = dict.fromkeys(case.cell.id for case in cases)
        if cells and self.count > len(cells):
            selected = "1 cell is" if len(cells) == 1 else f"{len(cells)} cells are"
            raise UsageError(f"--shard {self.index}/{self.count}: {selected} selected; ask for fewer shards")
        chosen = {cell for position, cell in enumerate(cells) if position % self.count == self.index - 1}
        return tuple(case for case in cases if case.cell.id in chosen)


def parse_shard(text: str) -> Shard:
    """Return the second of five shards for `2/5`. Raises UsageError for any other form."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", text)
    if match is None or int(match[1]) > int(match[2]):
        raise UsageError(f"--shard {text}: write I/N with 1 <= I <= N, such as 2/5")
    return Shard(int(match[1]), int(match[2]))


class RunOrder:
    """Order of cases: preconditions first, then the widest worlds; cases of a mesh and of a cell stay together.

    Within a mesh the slowest cells of the last session come first, so that workers end together; where few ranks are
    warm at once, `kind` groups cells whose ranks can be the same processes.
    """

    def __init__(
        self, cases: Iterable[Case], durations_s: Mapping[str, float], *, kind: Callable[[Cell], str] = lambda _: ""
    ) -> None:
        self._kind = kind
        cells: dict[str, float] = {}
        for case in cases:
            cells[case.cell.id] = cells.get(case.cell.id, 0.0) + durations_s.get(case.id, 0.0)
        longest_first = sorted(cells, key=lambda cell: -cells[cell])
        self._rank = {cell: rank for rank, cell in enumerate(longest_first)}

    def key(self, case: Case | None) -> tuple[bool, int, str, str, int, str]:
        """Return the sort key of a case; None, an item that is no case, comes last."""
        if case is None:
            return True, 0, "", "", 0, ""
        cell = case.cell
        return case.law not in _FIRST, -cell.world_size, cell.mesh, self._kind(cell), self._rank[cell.id], case.law


def remembered_durations_s(config: pytest.Config) -> dict[str, float]:
    """Return the duration of each case in the last session that ran it, by id of the case.

    Durations are in pytest's cache; without a cache (`-p no:cacheprovider`) cells keep the order of the matrix.
    """
    cache = getattr(config, "cache", None)
    durations_s = cache.get(_CACHE_KEY, {}) if cache is not None else {}
    return durations_s if isinstance(durations_s, dict) else {}


def remember_durations(config: pytest.Config, results: Iterable[CaseResult]) -> None:
    """Add the durations of a session to the remembered durations."""
    cache = getattr(config, "cache", None)
    if cache is not None:
        ran = {result.id: round(result.duration_s, 3) for result in results if result.duration_s > 0.0}
        cache.set(_CACHE_KEY, remembered_durations_s(config) | ran)
