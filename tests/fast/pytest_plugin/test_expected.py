"""Expected duration of a session: told at the start, and again when the cells that have ended took longer."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from conformance.detection.case_judge import the_matrix
from conformance.plan.cells import Cell
from conformance.plan.lock import STARTUP_S
from conformance.plan.matrix import Case
from conformance.pytest_plugin.expected import Expectation, Plan, plan_of
from conformance.report.schema import CaseResult
from tests.support.sample_reports import case

MATRIX = the_matrix()
CASES = MATRIX.cases("smoke")


def nodeids(cases: tuple[Case, ...]) -> Iterator[str]:
    return (f"conformance/laws/x.py::test_{each.law}[{each.cell.id}]" for each in cases)


def test_a_profile_is_planned_by_the_cells_of_the_lock_file() -> None:
    plan = plan_of(nodeids(CASES), CASES, MATRIX, profile="smoke", seed=0)
    assert plan is not None
    assert plan.has_all_laws
    assert sum(plan.cases.values()) == len(CASES)
    cells = {each.cell.id for each in CASES}
    assert sum(seconds for seconds, _ in plan.cells.values()) == pytest.approx(
        sum(MATRIX.seconds[cell] for cell in cells)
    )


def test_a_seed_changes_no_duration() -> None:
    seeded = MATRIX.cases("smoke", seed=3)
    plans = [
        plan_of(nodeids(cases), cases, MATRIX, profile="smoke", seed=seed) for seed, cases in ((0, CASES), (3, seeded))
    ]
    assert plans[0] is not None
    assert plans[1] is not None
    assert [*plans[0].cells.values()] == [*plans[1].cells.values()]


def test_laws_that_are_left_out_make_it_an_upper_bound() -> None:
    some = tuple(each for each in CASES if each.law != "PAR-1")
    plan = plan_of(nodeids(some), CASES, MATRIX, profile="smoke", seed=0)
    assert plan is not None
    assert not plan.has_all_laws
    assert expectation(plan).first_line().startswith("expected: at most ")


def test_short_sessions_and_unknown_cells_have_no_plan() -> None:
    assert plan_of(nodeids(CASES[:1]), CASES, MATRIX, profile="smoke", seed=0) is None
    unknown = tuple(Case("PAR-1", Cell(mesh="dp2", seed=seed)) for seed in range(7, 9))
    assert plan_of(nodeids((*CASES, *unknown)), (*CASES, *unknown), MATRIX, profile="smoke", seed=0) is None


TWO = Plan(cells={"a": (10.0, 2), "b": (50.0, 2)}, cases={"a": 2, "b": 1}, calibration_s=0.1, has_all_laws=True)


def expectation(plan: Plan, *, calibration_s: float = 0.2) -> Expectation:
    return Expectation(plan, calibration_s=calibration_s, processors=2, workers=1)


def result(law: str, cell: str, *, duration_s: float) -> CaseResult:
    return replace(case(f"{law}/{cell}"), duration_s=duration_s)


def test_a_slow_machine_is_told_at_the_start() -> None:
    expected = expectation(TWO)
    assert expected.session_s == pytest.approx(2 * (STARTUP_S + 60.0))
    assert expected.first_line() == (
        "expected: 136 s (2.3 min) on 2 processors, 2 times as slow as those of matrix.lock"
    )


def test_cells_that_end_as_expected_are_no_news() -> None:
    expected = expectation(TWO)
    assert not expected.news(result("PAR-1", "a", duration_s=15.0), elapsed_s=20.0)
    assert not expected.news(result("PAR-2", "a", duration_s=6.0), elapsed_s=26.0)


def test_cells_that_take_longer_are_news_once_they_have_ended() -> None:
    expected = expectation(TWO)
    assert not expected.news(result("PAR-1", "a", duration_s=50.0), elapsed_s=55.0), "it has another case"
    slower = (15.0 * 2 + 60.0) / (15.0 + 10.0)
    told = expected.news(result("PAR-2", "a", duration_s=10.0), elapsed_s=66.0)
    assert told == f"expected after 66 s: {slower * 50.0:.0f} s more, by the cells that have ended"
    assert not expected.news(result("PAR-1", "b", duration_s=180.0), elapsed_s=246.0), "as told"
