"""Mutants of torch: each fault has another effect, in every process that the hook reaches."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks import mutants
from benchmarks.mutants import HOOK, Judged, Mutant, Outcome, all_judged, module_of, outcome
from benchmarks.torch_faults import Fault, faults, source_of
from benchmarks.torch_mutants.judged_records import FILE, JudgedRecords
from benchmarks.torch_mutants.reaching_cases import OPTIONS, Case, Cases, add
from benchmarks.torch_mutants.syntax import Point, mutated, points, statement_at
from conformance.defects.injection import NotInjectable
from conformance.detection.case_judge import the_matrix
from conformance.plan.selection import parse
from conformance.torch_coverage.seen import Seen
from tests.support.programs import run_python
from tests.support.sample_reports import case, report

CASES = the_matrix().cases("pr")

SOURCE = """
def told(values, *, notes):
    total = 1
    if not values:
        raise ValueError("nothing to tell")
    for value in values:
        if value >= 2 and value != 5:
            total += value * 2
        elif len(notes):
            total -= 1
    notes.append(
        total,
    )
    notes.sort(reverse=True)
    return total
"""


def result(tree: Any) -> object:
    names: dict[str, Any] = {}
    exec(compile(tree, "told.py", "exec"), names)
    outcomes = []
    for values in ([1, 2], [5, 2, 1, 3], [4]):
        notes = [6, 3]
        try:
            outcomes.append((names["told"](values, notes=notes), notes))
        except (TypeError, ValueError) as error:
            outcomes.append((repr(error), notes))
    return outcomes


ALL = points(SOURCE)


@pytest.mark.parametrize("point", ALL, ids=lambda point: f"{point.number}: {point.change}")
def test_each_fault_changes_what_a_function_does(point: Any) -> None:
    assert point.function == "told"
    assert result(mutated(SOURCE, point.number)) != result(mutated(SOURCE, len(ALL)))


def test_faults_have_numbers_and_what_only_raises_has_none() -> None:
    assert [point.number for point in ALL] == list(range(len(ALL)))
    assert {point.line for point in ALL} == {3, 6, 7, 8, 9, 10, 11, 14}


def test_a_statement_begins_at_its_first_line() -> None:
    assert [statement_at(SOURCE, line) for line in (8, 12, 14)] == [8, 11, 14]


def a_case(nodeid: str, law: str, *records: str, seconds: float = 0.0) -> Case:
    return Case(nodeid, law, frozenset(records), seconds)


def some_cases(*cases: Case) -> Cases:
    seconds = {"quick": 1.0, "slow": 10.0, "elsewhere": 0.5}
    reached = {"quick": {"a.py": frozenset({3})}, "slow": {"a.py": frozenset({3, 4})}, "elsewhere": {}}
    return Cases(OPTIONS, list(cases), seconds, reached)


def test_cases_that_reach_a_line_are_selected_the_cheapest_of_each_law_first() -> None:
    cases = some_cases(
        a_case("long", "A", "quick", seconds=30.0),
        a_case("short", "A", "quick"),
        a_case("other", "B", "slow"),
        a_case("same run", "B", "quick", "slow", seconds=0.5),
        a_case("elsewhere", "C", "elsewhere"),
    )
    assert cases.lines("a.py") == {3, 4}
    assert cases.lines("b.py") == frozenset()
    assert cases.selected("a.py", {3}, limit_s=100.0) == ["short", "other", "same run", "long"]
    assert cases.selected("a.py", {3}, limit_s=12.0) == ["short", "other", "same run"]
    assert cases.selected("a.py", {4}, limit_s=1.0) == ["other"]
    assert cases.selected("a.py", {5}, limit_s=100.0) == []


def test_cases_of_a_session_that_judge_what_a_record_has_reached(tmp_path: Path) -> None:
    passed, failed = case("PAR-1/cell 1", "pass"), case("PAR-1/cell 2", "fail")
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(report(passed, failed)))
    lines = [msgspec.json.encode(JudgedRecords(each.nodeid, ["record"])) for each in (passed, failed)]
    (tmp_path / FILE).write_bytes(b"\n".join(lines))
    (tmp_path / "records" / "record").mkdir(parents=True)
    seen = Seen(torch="1", jumps={"a.py": {(-3, 4), (4, 5), (5, -3)}})
    (tmp_path / "records" / "record" / "torch-coverage-1.msgpack").write_bytes(msgspec.msgpack.encode(seen))
    cases = some_cases()
    add(cases, tmp_path)
    assert [(each.nodeid, each.law) for each in cases.cases] == [(passed.nodeid, "PAR-1")]
    assert cases.reached["record"] == {"a.py": {4, 5}}


def test_mutants_are_in_statements_that_cases_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "b.py").write_text(SOURCE)
    monkeypatch.setattr(mutants, "area_of_files", lambda: {"a.py": "area", "b.py": "area"})
    monkeypatch.setattr(mutants, "torch_directory", lambda: tmp_path)
    found = mutants.mutants(some_cases(a_case("one", "A", "quick")))
    assert [(mutant.file, mutant.point.line, mutant.change) for mutant in found] == [("a.py", 3, "torch.a:0")]


def test_modules_of_files() -> None:
    assert [module_of(f"amp/{name}.py") for name in ("grad_scaler", "__init__")] == [
        "torch.amp.grad_scaler",
        "torch.amp",
    ]
    with pytest.raises(ValueError, match=r"has no module torch.nowhere: see torch_faults.yaml"):
        source_of("torch.nowhere")


def test_mutants_that_were_judged_are_not_judged_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = []

    def judged(mutant: Mutant, _reached: Cases, *, limit_s: float) -> Judged:
        told.append((mutant, limit_s))
        return Judged(mutant, Outcome("survived"), 3)

    monkeypatch.setattr(mutants, "judged", judged)
    one, other = (Mutant("a.py", Point(number, 3, "told", "2 for 1"), frozenset({3})) for number in (0, 1))
    for sample in ([one], [one, other]):
        results = all_judged(tmp_path / "outcomes.json", some_cases(), sample, limit_s=5.0)
    assert told == [(one, 5.0), (other, 5.0)]
    assert [mutants.row(result)[2:] for result in results] == [["survived", "3 cases"]] * 2


@pytest.mark.parametrize("name", faults())
def test_torch_faults_fit_the_pinned_torch(name: str) -> None:
    if not torch.__version__.startswith("2.13."):
        pytest.skip(f"written against torch 2.13, this is {torch.__version__}")
    fault = faults()[name]
    compile(fault.applied(source_of(fault.target)), name, "exec")
    selection = parse(fault.cells)
    assert any(selection(case.cell) for case in CASES), f"no cell of profile pr: {fault.cells}"


def test_a_fault_that_does_not_fit_is_refused() -> None:
    fault = Fault(target="torch.nn.utils.clip_grad", cells="mesh = dp2", old="nothing like that", new="")
    with pytest.raises(NotInjectable, match=r"clip_grad has this 0 times and not 1: nothing like that"):
        fault.applied(source_of(fault.target))


@pytest.mark.parametrize(
    ("verdicts", "ended"),
    [
        (["pass", "fail"], Outcome("fail", "PAR-1/cell 1", "why fail")),
        (["pass", "waived"], Outcome("survived")),
        (["not-run", "not-run"], Outcome("nothing judged")),
    ],
)
def test_a_session_that_judges_nothing_is_no_survival(
    verdicts: list[str], ended: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_report(_change: str, _selection: list[str], directory: Path, *_options: str) -> None:
        results = [case(f"PAR-1/cell {number}", verdict) for number, verdict in enumerate(verdicts)]
        (directory / "report").mkdir()
        (directory / "report" / "report.json").write_bytes(msgspec.json.encode(report(*results)))

    monkeypatch.setattr(mutants, "session", write_report)
    assert outcome("change", []) == ended


def test_the_hook_changes_a_module_of_torch_as_it_is_imported() -> None:
    """A mutant multiplies max_norm with the norm instead of dividing by it."""
    module = "torch.nn.utils.clip_grad"
    (point,) = [point for point in points(source_of(module)) if point.change.startswith("Mult in max_norm")]
    program = "import torch; p = torch.ones(1, requires_grad=True); p.grad = torch.ones(1); "
    program += "torch.nn.utils.clip_grads_with_norm_([p], 0.25, torch.tensor(2.0)); print(p.grad.item())"
    factors = []
    for mutant in ("", f"{module}:{point.number}"):
        variables = {"PYTHONPATH": str(HOOK), "MUTANT": mutant}
        factors.append(float(run_python("-c", program, variables=variables).stdout))
    assert factors == pytest.approx([0.125, 0.5], rel=1e-3)
