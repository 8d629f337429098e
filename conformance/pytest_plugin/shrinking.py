"""Search for the smallest failing cell of each cause, when all cases of a session have their verdicts.

Results of the session count as answers. What is judged besides changes no verdict: it is in no case of the report.
"""

import inspect
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from conformance.judge.judge import Judged, judge
from conformance.judge.measurements import Measurement
from conformance.judge.registry import asserted_laws
from conformance.judge.shrinking import SearchEnded, Shrunk, features_of, shrink, with_only
from conformance.judge.verdicts import Verdict
from conformance.plan.cells import Cell, cell_from_id
from conformance.plan.matrix import Case, Matrix
from conformance.plan.mesh import AxisError
from conformance.pytest_plugin.cases import repeat_command
from conformance.pytest_plugin.setup import SessionSetup
from conformance.report.explain import Explanation
from conformance.report.schema import CaseResult, Smallest
from conformance.report.wording import is_outside, spelled

Judge = Callable[[Case, float], Judged]
"""Function that judges a case within a number of seconds."""
_PASSED = (Verdict.PASS, Verdict.QUALITY_WARNING)
_SHRUNK = (Verdict.FAIL, Verdict.CRASH, Verdict.ERROR)
_JUDGED = (*_PASSED, Verdict.WAIVED, Verdict.FAIL, Verdict.CRASH)
_UNFINISHED = re.compile(r"rank \d+ [^:]*")


class Outcome(NamedTuple):
    """Verdict on a case, and its cause; failures of a law with equal outcomes have the same symptoms."""

    verdict: Verdict
    cause: str


def outcome_of(verdict: str, measured: Mapping[str, Measurement], reason: str) -> Outcome:
    """Return the outcome of a case.

    The cause is the metric that is outside of its bounds, or how the run ended, whatever step and rank.
    """
    broken = next((name for name in reversed(list(measured)) if is_outside(measured[name])), "")
    unfinished = _UNFINISHED.match(reason)
    cause = broken or (unfinished[0] if unfinished else "")
    return Outcome(Verdict(verdict), re.sub(r"\d+", "#", cause))


class Shrinker:
    """Searches of one session, which share their time and their answers."""

    def __init__(
        self,
        matrix: Matrix,
        cases: Sequence[CaseResult],
        judge: Judge,
        *,
        budget_s: float,
    ) -> None:
        """Take the results of the session, and a time for all searches together, which starts now."""
        self._matrix, self._judge = matrix, judge
        self._until_s = time.monotonic() + budget_s
        self._outcomes = {case.id: outcome_of(case.verdict, case.measured, case.reason) for case in cases}
        self.judged = 0
        """Number of cases that were judged besides those of the session."""
        self._is_interrupted = False
        self._found: list[Cell] = []

    def smallest(self, explanations: Sequence[Explanation], repeat: Callable[[Case], str]) -> list[Smallest]:
        """Return the smallest cell of each explanation whose search has ended, or has found a smaller cell in time.

        `repeat` returns the command that repeats a case. Ctrl-C ends the searches.
        """
        found = [self._of(each, repeat) for explanation in explanations for each in explanation.with_related]
        return [smallest for smallest in found if smallest is not None]

    def _of(self, explanation: Explanation, repeat: Callable[[Case], str]) -> Smallest | None:
        cases = _shrinkable(explanation)
        if not cases or self._left_s() <= 0:
            return None
        start_s, judged_before = time.monotonic(), self.judged
        first = min(cases, key=lambda case: (case.cell.world_size, case.cell.features))
        shrunk = self.search(first, guesses=[*self._found, *_in_common(first.cell, cases)])
        if not shrunk.complete and shrunk.cell == first.cell:
            return None
        self._found.append(shrunk.cell)
        return Smallest(
            case=first.id,
            law=first.law,
            cell=shrunk.cell.id,
            features={name: spelled(value) for name, value in shrunk.features.items()},
            bound={name: spelled(value) for name, value in shrunk.required.items()},
            passes=all(self._outcomes[first.on(c).id].verdict in _PASSED for c in shrunk.neighbours),
            complete=shrunk.complete,
            judged=self.judged - judged_before,
            seconds=round(time.monotonic() - start_s, 2),
            repro=repeat(first.on(shrunk.cell)),
        )

    def search(self, case: Case, *, guesses: Sequence[Cell] = ()) -> Shrunk:
        """Return the smallest cell on which the law of a failed case of the session fails with the same symptoms."""
        expected = self._outcomes[case.id]

        def fails(cell: Cell) -> bool | None:
            outcome = self._outcome(case.on(cell))
            if outcome is None or outcome.verdict not in (*_JUDGED, expected.verdict):
                return None
            return outcome == expected

        return shrink(case.cell, fails, meshes=self._matrix.content.combined_meshes, guesses=guesses)

    def _outcome(self, case: Case) -> Outcome | None:
        """Return the outcome of a case, None for one that cannot be; raises SearchEnded if there is no time for it."""
        if case.id in self._outcomes:
            return self._outcomes[case.id]
        if not self._matrix.is_possible(case):
            return None
        if self._left_s() <= 0:
            raise SearchEnded
        self.judged += 1
        try:
            judged = self._judge(case, max(1.0, self._left_s()))
        except KeyboardInterrupt:
            self._is_interrupted = True
            raise SearchEnded from None
        if judged.verdict == Verdict.TIMEOUT:
            raise SearchEnded
        self._outcomes[case.id] = outcome_of(judged.verdict, judged.measured, judged.reason)
        return self._outcomes[case.id]

    def _left_s(self) -> float:
        return 0.0 if self._is_interrupted else self._until_s - time.monotonic()


def has_combined(explanations: Sequence[Explanation]) -> bool:
    """Return whether there is a failure whose cell could be smaller."""
    return any(_shrinkable(each) for explanation in explanations for each in explanation.with_related)


def smallest_cells(
    setup: SessionSetup, cases: Sequence[CaseResult], explanations: Sequence[Explanation]
) -> list[Smallest]:
    """Return the smallest failing cells of a session that has ended with these cases and explanations of failures."""
    setup.store.pools.prepare()  # ranks load torch while this process imports the laws
    shrinker = Shrinker(setup.matrix, cases, session_judge(setup), budget_s=setup.shrink_s)
    return shrinker.smallest(explanations, session_repeat(setup))


def session_judge(setup: SessionSetup) -> Judge:
    """Return a function that judges cases as a session does, in this process and with the session's records."""

    def judge_within(case: Case, limit_s: float) -> Judged:
        law = asserted_laws()[case.law]
        return judge(
            case,
            law.law,
            law.test,
            setup.store.within(limit_s),
            machine=setup.machine,
            profile=setup.profile,
            waivers=setup.known_failures,
        )

    return judge_within


def session_repeat(setup: SessionSetup) -> Callable[[Case], str]:
    """Return a function that returns the command that repeats a case on any cell, which `--cells` names."""

    def repeat(case: Case) -> str:
        test = asserted_laws()[case.law].test
        unseeded = case.cell.but(seed=case.cell.seed - setup.seed)
        options = [*setup.repro_options, f"--cells={unseeded.id}"]
        name = f"{test.__name__}[{case.cell.id}]"
        return repeat_command(Path(inspect.getfile(test)), name, options, directory=setup.directory)

    return repeat


def _shrinkable(explanation: Explanation) -> list[Case]:
    """Return the cases of an explanation; none if one is on a plain cell, or if they tell of no fault to search for."""
    try:
        cases = [Case(result.law, cell_from_id(result.cell)) for result in explanation.cases]
    except AxisError:
        return []
    is_combined = all(case.cell.features and case.law != "?" for case in cases)
    return cases if is_combined and explanation.first.verdict in _SHRUNK else []


def _in_common(cell: Cell, cases: Sequence[Case]) -> list[Cell]:
    """Return cells with the features that all cases have in common, on the default mesh and on that of the cell."""
    features = [features_of(case.cell).items() for case in cases]
    common = {name: value for name, value in features_of(cell).items() if all((name, value) in f for f in features)}
    common.pop("mesh", None)
    plain = with_only(Cell(seed=cell.seed), common)
    return [plain, plain.but(mesh=cell.mesh)]
