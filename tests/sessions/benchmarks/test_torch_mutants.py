"""Mutants of torch: each fault has another effect, in every process that the hook reaches."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks import mutants
from benchmarks.mutants import HOOK, MODULES, Outcome, outcome, source_of
from benchmarks.torch_faults import Fault, faults
from benchmarks.torch_mutants.syntax import HIT, mutated, points, statement_at, with_hits
from conformance.defects.injection import NotInjectable
from conformance.detection.case_judge import the_matrix
from conformance.plan.selection import parse
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


def result(tree: Any, hits: list[int] | None = None) -> object:
    names: dict[str, Any] = {HIT: (hits if hits is not None else []).append}
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


def test_statements_say_that_they_are_reached() -> None:
    hits: list[int] = []
    assert result(with_hits(SOURCE), hits) == result(mutated(SOURCE, len(ALL)))
    assert set(hits) == {3, 4, 6, 7, 8, 9, 10, 11, 14, 15}
    assert statement_at(SOURCE, 12) == 11


def test_modules_of_torch_have_points() -> None:
    assert all(len(points(source_of(module))) > 10 for module in MODULES)
    with pytest.raises(ValueError, match=r"has no module torch.nowhere: see MODULES"):
        source_of("torch.nowhere")


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
