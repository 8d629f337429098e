"""A bench: cases of the matrix judged in this process, without pytest, with a defect or without."""

import inspect
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.cli.describe import law_tests
from conformance.defects.catalogue import is_known
from conformance.judge.law import law_of
from conformance.judge.measurements import Measurement, collecting
from conformance.judge.verdicts import Verdict, classify
from conformance.plan.matrix import Case, Matrix, load_matrix
from conformance.plan.selection import parse
from conformance.project import PROJECT
from conformance.run.pool import Pools
from conformance.run.store import Clock, RecordStore

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Judged:
    """A case with its verdict, and the figures that it rests on."""

    case: Case
    verdict: Verdict
    reason: str
    measured: dict[str, Measurement] = field(default_factory=dict)


@cache
def the_matrix() -> Matrix:
    """That of the project."""
    return load_matrix(PROJECT / "matrix.yaml")


@dataclass
class Bench:
    """Judges cells of a profile, with one pool of ranks for all that it is asked."""

    directory: Path
    """For records."""
    pools: Pools
    profile: str = "pr"

    def store(self, *, defect: str | None = None, deadline_s: float = DEADLINE_S) -> RecordStore:
        """Ranks are shared between known defects, see `trials.try_defect`; others may leave anything behind."""
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
        """Of the profile, on the selected cells, of all laws or some."""
        found = the_matrix().cases(self.profile, only=parse(selection))
        return [case for case in found if only is None or case.law in only]

    def judge(self, cases: Sequence[Case], *, defect: str | None, deadline_s: float = DEADLINE_S) -> list[Judged]:
        """Each case with a deadline of its own; records are shared between them."""
        store = self.store(defect=defect, deadline_s=deadline_s)
        return [judged(store, case) for case in cases]


def judged(store: RecordStore, case: Case) -> Judged:
    """The verdict on one case, from what is in the store or is run for it."""
    test = law_tests()[case.law]
    law = law_of(test)
    assert law is not None
    store.clock, store.accepts = Clock(), law.substrates
    fixtures: dict[str, Any] = {"run": store.run, "probe": store.probe, "measure": store.measure, "cell": case.cell}
    arguments = {name: fixtures[name] for name in inspect.signature(test).parameters}
    verdict, reason = Verdict.PASS, ""
    with collecting() as measured:
        try:
            test(**arguments)
        except (Exception, pytest.skip.Exception, pytest.fail.Exception) as error:
            verdict, reason = classify(error)
    return Judged(case, verdict, reason, measured)


def excess(measured: dict[str, Measurement]) -> float:
    """How many times its bound the worst figure is: above 1 is outside; infinite where nothing but one value is right,
    or where a figure is not finite."""
    return max((_excess(figure) for figure in measured.values()), default=0.0)


def _excess(figure: Measurement) -> float:
    if figure.value is None:
        return float("inf")
    above = _ratio(figure.value, figure.upper) if figure.upper is not None and figure.value > 0 else 0.0
    below = _ratio(figure.lower, figure.value) if figure.lower is not None and figure.lower > 0 else 0.0
    if figure.lower is not None and figure.lower == figure.upper:
        return 0.0 if figure.value == figure.lower else float("inf")
    return max(above, below)


def _ratio(value: float, bound: float) -> float:
    with suppress(ZeroDivisionError):
        return max(0.0, value / bound)
    return float("inf") if value else 0.0
