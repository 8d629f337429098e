"""Expected duration of a session: from matrix.lock and a calibration at its start, then corrected by ended cells."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from conformance.plan.cells import Cell
from conformance.plan.duration import Workplace
from conformance.plan.matrix import Case, Matrix
from conformance.report.schema import CaseResult
from conformance.run.ranks.messages import MAX_WORLD_SIZE

_TRUSTED_S = 15.0
"""Seconds of the reference machine for which the calibration counts when cells have ended; a figure of this suite."""
_WORTH_S = 10.0
"""Seconds of the reference machine below which a session is not worth a calibration."""
_NEWS = 1.25
"""Ratio by which an expected duration changes before it is told again."""


@dataclass(frozen=True)
class Plan:
    """Cells of a session, with their expected durations."""

    cells: Mapping[str, tuple[float, int]]
    """Duration on the reference machine and number of processes, by id."""
    cases: Mapping[str, int]
    """Number of cases of each cell."""
    calibration_s: float
    """Time that the calibration takes on the reference machine."""
    has_all_laws: bool
    """False if laws were left out, whose share of a cell's duration is not known."""


def plan_of(nodeids: Iterable[str], cases: Iterable[Case], matrix: Matrix, *, profile: str, seed: int) -> Plan | None:
    """Return the expected durations of items of a profile with these ids, which are among `cases`.

    None if the lock file lacks a cell of theirs, and for a session that is too short to need it. `seed` was added to
    the seed of each cell, which changes no duration.
    """
    cells = {case.cell.id: case.cell for case in cases}
    names = (nodeid.rpartition("[")[2].removesuffix("]") for nodeid in nodeids)
    numbers = Counter(cells[name] for name in names if name in cells)
    planned = {cell: cell.but(seed=cell.seed - seed) for cell in numbers}
    if sum(matrix.seconds.get(cell.id, 0.0) for cell in planned.values()) < _WORTH_S:
        return None
    if not all(cell.id in matrix.seconds for cell in planned.values()):
        return None
    return Plan(
        cells={cell.id: (matrix.seconds[locked.id], _processes(cell)) for cell, locked in planned.items()},
        cases={cell.id: number for cell, number in numbers.items()},
        calibration_s=matrix.calibration_s,
        has_all_laws=all(number == len(matrix.laws_in(profile, planned[cell])) for cell, number in numbers.items()),
    )


def _processes(cell: Cell) -> int:
    """Return the number of processes that run a cell: a world that is too wide for them is simulated in one."""
    return cell.world_size if cell.world_size <= MAX_WORLD_SIZE else 1


class Expectation:
    """Expected duration of a session on this machine, which its cells correct as they end."""

    def __init__(self, plan: Plan, *, calibration_s: float, processors: int, workers: int) -> None:
        self._plan, self._processors, self._workers = plan, processors, workers
        self._calibrated = calibration_s / plan.calibration_s
        self._left = dict(plan.cases)
        self._measured_s: dict[str, float] = defaultdict(float)
        self.session_s = round(self._place(self._calibrated).session_s(plan.cells.values()), 1)
        """Expected duration by the calibration alone; an upper bound if laws were left out. Rounded once, so that the
        first line and the report show the same number."""
        self._told_s = self.session_s

    def first_line(self) -> str:
        """Return the expected duration in words."""
        bound = "" if self._plan.has_all_laws else "at most "
        minutes = f" ({self.session_s / 60:.1f} min)" if self.session_s >= 60 else ""
        return (
            f"expected: {bound}{self.session_s:.0f} s{minutes} on {self._processors} processors, "
            f"{self._calibrated:.2g} times as slow as those of matrix.lock"
        )

    def news(self, result: CaseResult, *, elapsed_s: float) -> str:
        """Return a line if the case that has ended changes the expected duration much; otherwise nothing."""
        self._left[result.cell] -= 1
        self._measured_s[result.cell] += result.duration_s - result.wait_s
        if not self._plan.has_all_laws or self._left[result.cell]:
            return ""
        left_s = self._place(self._slower()).cells_s(
            self._plan.cells[cell] for cell, left in self._left.items() if left
        )
        if 1 / _NEWS < (elapsed_s + left_s) / self._told_s < _NEWS:
            return ""
        self._told_s = elapsed_s + left_s
        return f"expected after {elapsed_s:.0f} s: {left_s:.0f} s more, by the cells that have ended"

    def _slower(self) -> float:
        """Return how much slower this machine is, by the cells that have ended, and at first by the calibration."""
        ended = [cell for cell, left in self._left.items() if not left]
        planned_s = sum(self._plan.cells[cell][0] for cell in ended)
        measured_s = sum(self._measured_s[cell] for cell in ended)
        return (self._calibrated * _TRUSTED_S + measured_s) / (_TRUSTED_S + planned_s)

    def _place(self, slower: float) -> Workplace:
        return Workplace(self._processors, self._workers, slower)
