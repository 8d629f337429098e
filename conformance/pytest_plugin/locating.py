"""Search for the first wrong place of each cause, when all cases of a session have their verdicts.

Failed cells are run once more, with taps. Nothing of it changes a verdict, errors included.
"""

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from conformance.judge.measurements import Measurement
from conformance.judge.support import Machine
from conformance.judge.verdicts import Verdict
from conformance.localisation.families import where_of
from conformance.plan.cells import cell_from_id
from conformance.plan.matrix import Case
from conformance.plan.mesh import AxisError
from conformance.pytest_plugin.setup import SessionSetup
from conformance.pytest_plugin.shrinking import Judge, session_judge
from conformance.report.explain import Explanation
from conformance.report.location import Location
from conformance.report.schema import CaseResult
from conformance.run.store import RecordStore


class Symptoms(NamedTuple):
    """Metrics and reason of a failed case."""

    measured: Mapping[str, Measurement]
    reason: str


Locate = Callable[[Case, float, Symptoms], Location | None]
"""Function that returns the first wrong place of a case with these symptoms, found within a number of seconds."""
_LOCATED = (Verdict.FAIL, Verdict.CRASH, Verdict.TIMEOUT)


class Explained(Protocol):
    """Function that runs the cell of a case with taps; see `conformance.localisation.localise.explained`."""

    def __call__(
        self,
        case: Case,
        store: RecordStore,
        *,
        machine: Machine,
        measured: Mapping[str, Measurement],
        reason: str,
    ) -> Location | None:
        """Return the first wrong place of a case with these metrics; None if nothing is wrong on its cell."""


class Located(NamedTuple):
    """First wrong places, at most one for each cause."""

    locations: list[Location]
    error: BaseException | None
    """First error, with which the search for one cause ended."""


class Locator:
    """Searches of one session, which share their time and the results of a cell."""

    def __init__(self, cases: Sequence[CaseResult], locate: Locate, judge: Judge, *, budget_s: float) -> None:
        """Take the results of the session, and a time for all searches together, which starts now."""
        self._locate, self._judge = locate, judge
        self._until_s = time.monotonic() + budget_s
        self._symptoms = {case.id: Symptoms(case.measured, case.reason) for case in cases}
        self._found: dict[tuple[str, tuple[str, ...]], Location] = {}

    def located(self, explanations: Sequence[Explanation], *, trainer: str | None = None) -> Located:
        """Return the first wrong place of each cause that is found in time.

        An error ends the search of its cause alone, Ctrl-C that of all.
        """
        found: list[Location] = []
        first_error: BaseException | None = None
        for explanation in explanations:
            case = _case_to_locate(explanation, trainer)
            if case is None or self._left_s() <= 0:
                continue
            try:
                location = self._location(case)
            except KeyboardInterrupt as interrupt:
                return Located(found, first_error or interrupt)
            except Exception as error:
                first_error = first_error or error
                continue
            if location is not None:
                found.append(replace(location, case=explanation.first.id))
        return Located(found, first_error)

    def _location(self, case: Case) -> Location | None:
        """Return the first wrong place of a case; laws with the same searches share one that is on the cell itself."""
        key = case.cell.id, where_of(case.law).searches
        if key in self._found:
            return self._found[key]
        location = self._locate(case, self._limit_s(), self._symptoms_of(case))
        if location is not None and location.cell == case.cell.id:
            self._found[key] = location
        return location

    def _symptoms_of(self, case: Case) -> Symptoms:
        """Return the symptoms of a case, judged now if the session has not: on a smallest cell from its records."""
        if case.id not in self._symptoms:
            judged = self._judge(case, self._limit_s())
            self._symptoms[case.id] = Symptoms(judged.measured, judged.reason)
        return self._symptoms[case.id]

    def _limit_s(self) -> float:
        return max(1.0, self._left_s())

    def _left_s(self) -> float:
        return self._until_s - time.monotonic()


def has_located(setup: SessionSetup, explanations: Sequence[Explanation]) -> bool:
    """Return whether there is a failure whose first wrong place can be searched for."""
    return any(_case_to_locate(each, setup.trainer) for each in explanations)


def locations(setup: SessionSetup, cases: Sequence[CaseResult], explanations: Sequence[Explanation]) -> Located:
    """Return the first wrong places of a session that has ended with these cases and explanations of failures."""
    setup.store.pools.prepare()  # ranks load torch while this process imports the laws
    explained, machine = localiser(), setup.machine

    def locate(case: Case, limit_s: float, symptoms: Symptoms) -> Location | None:
        return explained(case, setup.store.within(limit_s), machine=machine, **symptoms._asdict())

    locator = Locator(cases, locate, session_judge(setup), budget_s=setup.explain_s)
    return locator.located(explanations, trainer=setup.trainer)


def localiser() -> Explained:
    """Return the function that runs a cell with taps; its module takes torch, which planning does without."""
    explained: Explained = importlib.import_module("conformance.localisation.localise").explained
    return explained


def _case_to_locate(explanation: Explanation, trainer: str | None) -> Case | None:
    """Return the first case of a cause, on the smallest cell that was found; None if it is about no run of a cell."""
    first, smallest = explanation.first, explanation.smallest
    if first.verdict not in _LOCATED or first.law == "?":
        return None
    try:
        cell = cell_from_id(smallest.cell if smallest and smallest.law == first.law else first.cell)
    except AxisError:
        return None
    return Case(first.law, cell, trainer)
