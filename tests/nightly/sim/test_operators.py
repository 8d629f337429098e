"""Torch's operator database on the simulated device: no operator fails beyond those that have a reason."""

from pathlib import Path

from conformance.sim_runs.operators import database
from conformance.sim_runs.operators.cases import THOROUGH, Outcome, cases
from conformance.sim_runs.operators.reasons import read_reasons
from conformance.sim_runs.operators.sweep import Outcomes, sweep
from tests.support.simulated_processes import library


def test_operators_are_those_of_the_cpu(tmp_path: Path) -> None:
    if library() is None:
        return
    outcomes = Outcomes(tmp_path / "outcomes.jsonl", "lazy")
    judged = sweep(cases(list(database.operators()), [THOROUGH]), outcomes, lambda *_: None)
    failed = {case: each for case, each in judged.items() if each.outcome != Outcome.EQUAL}
    reasons = read_reasons()
    assert {case: each for case, each in failed.items() if reasons.row(case, each.outcome) is None} == {}
    assert sum(each.outcome == Outcome.EQUAL and each.samples > 0 for each in judged.values()) > 2000
