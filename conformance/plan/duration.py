"""Expected duration of a session: the durations of its cells, on a machine of any speed and number of processors."""

from collections.abc import Iterable
from dataclasses import dataclass

from conformance.plan.lock import STARTUP_S

_REFERENCE_PROCESSORS = 2
"""Processors of the machine whose durations the lock file has."""


@dataclass(frozen=True)
class Workplace:
    """Processors and workers of a session, and how much slower the processors are than those of the reference."""

    processors: int
    workers: int
    slower: float
    """Ratio of the calibrations. Two ranks take part in each, so that a single processor doubles it."""

    def session_s(self, cells: Iterable[tuple[float, int]]) -> float:
        """Return the expected duration of a session with cells of these durations on the reference and world sizes."""
        return self.slower * STARTUP_S + self.cells_s(cells)

    def cells_s(self, cells: Iterable[tuple[float, int]]) -> float:
        """Return the expected duration of cells in a session that has started.

        No schedule is shorter than its longest cell, than its work on all workers, or than the time for which worlds
        hold processors on all processors; workers that take what is next come close to the longest of these times.
        """
        cells_s = [(self._alone_s(seconds, ranks), ranks) for seconds, ranks in cells]
        if not cells_s:
            return 0.0
        held_s = sum(seconds * min(ranks, self.processors) for seconds, ranks in cells_s) / self.processors
        worked_s = sum(seconds for seconds, _ in cells_s) / self.workers
        return self.slower * max(held_s, worked_s, max(seconds for seconds, _ in cells_s))

    def _alone_s(self, seconds: float, ranks: int) -> float:
        """Return the duration of a cell that shares no processor with another: wide worlds gain by more processors."""
        on_reference, here = (min(ranks, max(each, _REFERENCE_PROCESSORS)) for each in (2, self.processors))
        return seconds * on_reference / here
