"""The pipeline from a case to its verdict: skipped runs, and the verdict for each outcome of a law's test."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from conformance.judge.judge import Judged, judge
from conformance.judge.law import law, law_of
from conformance.judge.measurements import Measurement, measure
from conformance.judge.support import Machine
from conformance.judge.verdicts import Verdict
from conformance.judge.waivers import Symptom, Waiver
from conformance.outcomes import ConformanceFailure, Unsupported
from conformance.plan.cells import Cell
from conformance.plan.matrix import Case
from conformance.run.devices.hardware import Hardware
from conformance.run.store import RecordStore

CASE = Case("PAR-1", Cell(mesh="dp2"))
MACHINE = Machine(hardware=Hardware(), torch_version="2.13.0+cpu", max_world_size=8)
WAIVER = Waiver(
    law="PAR-1",
    cells="world = 2",
    device="cpu",
    torch="2.13 - 2.13",
    issue="https://github.com/pytorch/pytorch/issues/1",
    reason="it is so",
    expires="2027-01-31",
    shows=[Symptom(metric="difference", least=3.0, most=3.0)],
)


@pytest.fixture
def judged(store: RecordStore) -> Callable[..., Judged]:
    """Function that judges `CASE` by a law whose test ends with an exception, or passes."""

    def run(
        outcome: BaseException | None = None, *, since: str = "2.6", upper: float = 4.0, **options: object
    ) -> Judged:
        @law("PAR-1", where="world > 1", reference="https://docs.pytorch.org", since=since)
        def test(cell: Cell) -> None:
            """Ranks MUST agree."""
            assert cell == CASE.cell
            measure("difference", 3.0, upper=upper, unit="bytes", kind="memory")
            if outcome:
                raise outcome

        declared = law_of(test)
        assert declared is not None
        return judge(CASE, declared, test, store, **{"machine": MACHINE, **options})  # type: ignore[arg-type]

    return run


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore.__new__(RecordStore)  # these tests of laws run nothing


@pytest.mark.parametrize(
    ("outcome", "verdict", "reason"),
    [
        (None, Verdict.PASS, ""),
        (ConformanceFailure("4 is above 3"), Verdict.FAIL, "4 is above 3"),
        (Unsupported("no such API"), Verdict.UNSUPPORTED, "no such API"),
        (KeyError("key"), Verdict.ERROR, "KeyError: 'key'"),
    ],
)
def test_outcomes(judged: Callable[..., Judged], outcome: Exception | None, verdict: Verdict, reason: str) -> None:
    result = judged(outcome)
    assert (result.verdict, result.reason, result.error) == (verdict, reason, outcome)
    assert result.measured["difference"].value == 3.0
    assert result.substrate == "gloo"


def test_an_interrupt_is_no_verdict(judged: Callable[..., Judged]) -> None:
    with pytest.raises(KeyboardInterrupt):
        judged(KeyboardInterrupt())


def test_a_case_that_the_machine_cannot_judge_is_not_run(judged: Callable[..., Judged]) -> None:
    result = judged(since="2.14")
    assert (result.verdict, result.measured) == (Verdict.UNSUPPORTED, {})
    assert result.reason == "PAR-1 holds from torch 2.14 on; this is 2.13.0+cpu"


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [(ConformanceFailure("4"), Verdict.WAIVED), (None, Verdict.UNEXPECTED_PASS), (KeyError(), Verdict.ERROR)],
)
def test_waivers(judged: Callable[..., Judged], outcome: Exception | None, verdict: Verdict) -> None:
    assert judged(outcome, upper=2.0, waivers=[WAIVER]).verdict == verdict


@pytest.mark.parametrize(
    ("outcome", "verdict"), [(None, Verdict.QUALITY_WARNING), (ConformanceFailure("4"), Verdict.FAIL)]
)
def test_drift_is_looked_for_in_cases_that_pass(
    judged: Callable[..., Judged], outcome: Exception | None, verdict: Verdict
) -> None:
    def drift(case: str, measured: Mapping[str, Measurement]) -> tuple[Verdict, str]:
        assert (case, set(measured)) == (CASE.id, {"difference"})
        return Verdict.QUALITY_WARNING, "3 bytes, 2 before"

    assert judged(outcome, drift=drift).verdict == verdict
