"""Search for smallest failing cells after a session: its answers, its time, its end, and its lines in reports."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance.cli.verify import verify
from conformance.detection.case_judge import the_matrix
from conformance.judge.judge import Judged
from conformance.judge.measurements import Measurement
from conformance.judge.verdicts import Verdict
from conformance.plan.cells import Cell
from conformance.plan.matrix import Case
from conformance.project import data_file
from conformance.pytest_plugin.cases import cases_of
from conformance.pytest_plugin.shrinking import Shrinker, outcome_of
from conformance.report.explain import explain, smallest_text
from conformance.report.html import html_report
from conformance.report.schema import CaseResult, Report, Smallest
from conformance.report.text import markdown, terminal_lines
from tests.support import miniatures, sample_reports
from tests.support.sessions import PYTEST, finish, suite

MATRIX = the_matrix()
LAW = "PAR-1"
COMBINED = Cell(offload="cpu", accumulation=2, tied_embeddings=True, optimizer="sgd", forward_prefetch=1)
NEEDED = {"offload": "cpu", "accumulation": 2}


def off(name: str) -> dict[str, Measurement]:
    return {name: sample_reports.deviation(1.0)}


def failed(cell: Cell, law: str = LAW, metric: str = "gradient at step 0") -> CaseResult:
    return sample_reports.case(f"{law}/{cell.id}", "fail", **off(metric))


class Judge:
    """Judge for which laws fail on cells that have the needed features; `asked` has the cases."""

    def __init__(self, answer: Callable[[Case], Verdict] | None = None) -> None:
        self.asked: list[Case] = []
        self.answer = answer or (
            lambda case: (
                Verdict.FAIL
                if all(getattr(case.cell, name) == value for name, value in NEEDED.items())
                else Verdict.PASS
            )
        )

    def __call__(self, case: Case, limit_s: float) -> Judged:
        assert limit_s >= 1.0
        self.asked.append(case)
        verdict = self.answer(case)
        return Judged(case, "gloo", verdict, "why", off("gradient at step 7") if verdict == Verdict.FAIL else {})


def smallest_of(*cases: CaseResult, judge: Judge, budget_s: float = 60.0) -> list[Smallest]:
    shrinker = Shrinker(MATRIX, cases, judge, budget_s=budget_s)
    return shrinker.smallest(explain(sample_reports.report(*cases)), lambda case: f"repeat {case.id}")


def test_two_features_are_named() -> None:
    judge = Judge()
    (smallest,) = smallest_of(failed(COMBINED), judge=judge)
    assert smallest.features == {"accumulation": "2", "offload": "cpu"}
    assert smallest.cell == "dp2-fp32-default-meta-acc2-offloadcpu"
    assert (smallest.bound, smallest.passes, smallest.complete) == ({}, True, True)
    assert smallest.judged == len(judge.asked) == len(set(judge.asked))
    assert smallest.repro == f"repeat {LAW}/{smallest.cell}"


def test_what_the_session_knows_is_not_judged_again() -> None:
    cell = Cell(**NEEDED)  # type: ignore[arg-type]
    neighbours = [Cell(offload="cpu"), Cell(accumulation=2)]
    passed = [sample_reports.case(f"{LAW}/{neighbour.id}") for neighbour in neighbours]
    judge = Judge()
    (smallest,) = smallest_of(failed(cell), sample_reports.case(f"{LAW}/{Cell().id}"), *passed, judge=judge)
    assert smallest.features == {"accumulation": "2", "offload": "cpu"}
    assert judge.asked == []


def test_many_failures_of_a_cause_are_searched_once_and_begin_with_what_they_have_in_common() -> None:
    others = [COMBINED.but(optimizer="adamw", init="full"), COMBINED.but(tied_embeddings=False, steps=8)]
    judge = Judge()
    (smallest,) = smallest_of(*map(failed, [COMBINED, *others]), judge=judge)
    assert smallest.features == {"accumulation": "2", "offload": "cpu"}
    assert len(judge.asked) <= 6


def test_another_law_begins_where_the_first_has_ended() -> None:
    one, both = Judge(), Judge()
    smallest_of(failed(COMBINED), judge=one)
    found = smallest_of(failed(COMBINED), failed(COMBINED, "CLIP-1"), judge=both)
    assert [smallest.features.keys() for smallest in found] == [{"accumulation", "offload"}] * 2
    assert len(both.asked) <= len(one.asked) + 4


@pytest.mark.parametrize("verdict", [Verdict.UNEXPECTED_PASS, Verdict.TIMEOUT, Verdict.QUALITY_WARNING])
def test_other_verdicts_are_not_searched(verdict: Verdict) -> None:
    judge = Judge()
    assert smallest_of(sample_reports.case(f"{LAW}/{COMBINED.id}", verdict), judge=judge) == []
    assert judge.asked == []


def test_a_plain_cell_that_fails_says_all() -> None:
    judge = Judge()
    assert smallest_of(failed(COMBINED), failed(Cell()), judge=judge) == []
    assert judge.asked == []


def test_a_failure_of_another_metric_is_another_one() -> None:
    step = outcome_of("fail", off("update at step 0"), "")
    assert step == outcome_of("fail", off("update at step 7"), "")
    assert step != outcome_of("fail", off("loss"), "")
    raised = outcome_of("fail", {}, "rank 1 raised RuntimeError: sizes 3 and 4")
    assert raised == outcome_of("fail", {}, "rank 0 raised RuntimeError: sizes 5 and 6")
    assert raised != outcome_of("fail", {}, "rank 0 raised ValueError: sizes 5 and 6")


def ends(after: int, end: Callable[[], Verdict]) -> Judge:
    """Judge that answers that nothing but the combined cell fails, and ends after some answers."""
    judge = Judge()
    usual = judge.answer
    judge.answer = lambda case: usual(case) if len(judge.asked) <= after else end()
    return judge


def interrupt() -> Verdict:
    raise KeyboardInterrupt


@pytest.mark.parametrize("end", [interrupt, lambda: Verdict.TIMEOUT])
def test_an_early_end_leaves_what_is_known(end: Callable[[], Verdict]) -> None:
    judge = ends(5, end)
    (smallest,) = smallest_of(failed(COMBINED), judge=judge)
    assert not smallest.complete
    assert NEEDED.keys() <= smallest.features.keys()
    assert "may be needed" in smallest_text(smallest)
    assert len(judge.asked) == 6


def test_ctrl_c_ends_all_searches() -> None:
    judge = ends(0, interrupt)
    assert smallest_of(failed(COMBINED), failed(COMBINED, "CLIP-1"), judge=judge) == []
    assert len(judge.asked) == 1


def test_nothing_is_judged_without_time() -> None:
    judge = Judge()
    assert smallest_of(failed(COMBINED), judge=judge, budget_s=0.0) == []
    assert judge.asked == []


def smallest(features: Sequence[str], **other: Any) -> Smallest:
    fixed: dict[str, Any] = {"case": f"{LAW}/{COMBINED.id}", "law": LAW, "cell": "dp2-fp32-default-meta-x"}
    fixed |= {"bound": {}, "passes": True, "complete": True, "judged": 5, "seconds": 2.0, "repro": "pytest it"}
    return Smallest(features=dict.fromkeys(features, "1"), **{**fixed, **other})


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (smallest(["a", "b"]), "fails with a = 1 and b = 1; passes without either"),
        (smallest(["a"]), "fails with a = 1; passes without it"),
        (smallest(["a", "b", "c"]), "fails with a = 1, b = 1 and c = 1; passes without any one of these"),
        (smallest(["a"], passes=False), "fails with a = 1; does not fail alike without it"),
        (smallest([]), "fails without any feature"),
        (smallest(["a"], bound={"c": "2"}), "without it; no case of PAR-1 can do without c = 2"),
    ],
)
def test_sentences(found: Smallest, text: str) -> None:
    assert smallest_text(found).endswith(text)


def test_all_renderings_tell_the_smallest_cell_and_its_command() -> None:
    found = smallest(["offload", "accumulation"])
    report = sample_reports.report(failed(COMBINED), smallest=[found], verdicts={"fail": 1}, exit_code=1)
    for text in ("\n".join(terminal_lines(report, "here")), html_report(report)):
        assert smallest_text(found) in text
        assert found.repro in text
    assert found.repro in markdown(report)
    assert "passes without either" in markdown(report)


def test_a_cell_that_the_matrix_lacks_can_be_named() -> None:
    cases = cases_of("dp2-fp32-default-meta-acc2-offloadcpu", MATRIX, seed=3)
    assert {case.cell for case in cases} == {Cell(accumulation=2, offload="cpu", seed=3)}
    assert LAW in {case.law for case in cases}
    assert cases_of("tp = 2", MATRIX) == ()
    with pytest.raises(ValueError, match="cannot be: with one micro-batch"):
        cases_of("dp2-fp32-default-meta-synclast", MATRIX)


def test_a_session_names_both_features_and_a_command_that_repeats_the_smallest_cell(tmp_path: Path) -> None:
    cell = Cell(mesh="dp2", accumulation=2, offload="cpu", tied_embeddings=True, optimizer="sgd", schedule="cosine")
    fault = f"{miniatures.__file__}:summed_if_offloaded_and_accumulated"
    options = [
        f"--cells={cell.id}",
        f"--defect={fault}",
        "--seed=1",
        "conformance/laws/numerics/test_par.py",
        "--laws=PAR-1",
    ]
    ended = finish(suite(tmp_path / "report", *options, shrink_s=60.0), tmp_path / "report")
    report: Report = ended.report
    (found,) = report.smallest
    assert found.features == {"accumulation": "2", "offload": "cpu"}, ended.output
    assert found.cell == "dp2-fp32-default-meta-acc2-offloadcpu-seed1"
    assert (ended.status, report.verdicts, report.planned) == (1, {"fail": 1}, 1)
    assert "fails with accumulation = 2 and offload = cpu; passes without either" in ended.output
    assert verify(tmp_path / "report", matrix_file=data_file("matrix.yaml")).problems == []
    repeated = shlex.split(found.repro)
    arguments = [*repeated[repeated.index("-n0") :], "--shrink=0", "--explain=0", f"--report-dir={tmp_path / 'again'}"]
    again = finish([*PYTEST, *arguments], tmp_path / "again")
    assert again.verdicts == {f"{LAW}/{found.cell}": "fail"}, again.output
