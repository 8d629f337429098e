"""Cases of the matrix judged in this process, without pytest, with a defect or without."""

from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from conformance.cli.describe import law_tests
from conformance.defects.catalogue import is_known
from conformance.judge.judge import Judged, judge
from conformance.judge.law import law_of
from conformance.judge.measurements import Measurement
from conformance.judge.support import Machine
from conformance.plan.matrix import Case, Matrix, load_matrix
from conformance.plan.selection import parse
from conformance.project import PROJECT
from conformance.run.pool import Pools
from conformance.run.store import RecordStore

DEADLINE_S = 60.0


@cache
def the_matrix() -> Matrix:
    """Return the matrix of the project."""
    return load_matrix(PROJECT / "matrix.yaml")


@dataclass
class Bench:
    """Judges cases of a profile, with one pool of ranks for all that it is asked."""

    directory: Path
    """Directory for records."""
    pools: Pools
    profile: str = "pr"

    def store(self, *, defect: str | None = None, deadline_s: float = DEADLINE_S) -> RecordStore:
        """Return a record store; ranks are shared between known defects, see `trials.try_defect`.

        Other defects may leave anything behind.
        """
        return RecordStore(
            directory=self.directory,
            session="bench",
            torch_version=str(torch.__version__),
            defect=defect,
            deadline_s=deadline_s,
            pools=self.pools,
            shares_ranks=defect is None or is_known(defect),
        )

    def cases(self, selection: str, *, only: Container[str] | None = None) -> list[Case]:
        """Return the cases of the profile on the selected cells, of all laws or some."""
        cases = the_matrix().cases(self.profile, only=parse(selection))
        return [case for case in cases if only is None or case.law in only]

    def judge(self, cases: Sequence[Case], *, defect: str | None, deadline_s: float = DEADLINE_S) -> list[Judged]:
        """Judge each case with a deadline of its own; records are shared between them."""
        store = self.store(defect=defect, deadline_s=deadline_s)
        return [judged(store, case) for case in cases]


def judged(store: RecordStore, case: Case) -> Judged:
    """Judge one case, from what is in the store or is run for it."""
    test = law_tests()[case.law]
    law = law_of(test)
    assert law is not None
    pools = store.pools
    machine = Machine(hardware=store.hardware, torch_version=store.torch_version, max_world_size=pools.max_world_size)
    return judge(case, law, test, store, machine=machine)


def excess(measured: dict[str, Measurement]) -> float:
    """Return how far the worst metric is from its bound: above 1 is outside.

    Infinite where nothing but one value is right, or where a metric is not finite.
    """
    return max((_excess(metric) for metric in measured.values()), default=0.0)


def _excess(metric: Measurement) -> float:
    if metric.value is None:
        return float("inf")
    above = _ratio(metric.value, metric.upper) if metric.upper is not None and metric.value > 0 else 0.0
    below = _ratio(metric.lower, metric.value) if metric.lower is not None and metric.lower > 0 else 0.0
    if metric.lower is not None and metric.lower == metric.upper:
        return 0.0 if metric.value == metric.lower else float("inf")
    return max(above, below)


def _ratio(value: float, bound: float) -> float:
    with suppress(ZeroDivisionError):
        return max(0.0, value / bound)
    return float("inf") if value else 0.0
