"""Causes of another trainer's failures: their order, and the failures folded under them."""

from msgspec.structs import replace

from conformance.judge.registry import asserted_laws
from conformance.report.causes import CAUSAL_ORDER, CellCause, in_causal_order, merged
from conformance.report.explain import explain
from conformance.report.schema import CaseResult, Report
from conformance.report.text import terminal_lines
from conformance.report.trainer import FaultSeen, TrainerFacts, trainer_lines
from tests.support.sample_reports import case, report

DP2, ACC2 = "dp2-fp32-default-full", "dp2-fp32-default-full-acc2"


def failed(law: str, reason: str, cell: str = DP2, verdict: str = "fail") -> CaseResult:
    return replace(case(f"{law}/{cell}", verdict), reason=reason)


def test_every_law_of_any_trainer_has_a_place_in_the_order() -> None:
    assert {law for law, each in asserted_laws().items() if each.law.scope.of == "any trainer"} == {*CAUSAL_ORDER}


def test_the_first_cause_is_of_the_earliest_step_and_law() -> None:
    frozen = [
        failed("gradients", "gradient at step 1 of up.weight: relative Frobenius deviation 0.1"),
        failed("optimizer-holds-each-once", "wrong in the optimizer: measured 1; rank 0: missing up.weight"),
        failed("every-update", "parameters that do not move, of 6: measured 1; step 0: up.weight"),
        failed("loss", "loss at step 1: relative deviation 0.1"),
    ]
    order = ["every-update", "gradients", "loss", "optimizer-holds-each-once"]
    assert [each.law for each in in_causal_order(frozen)] == order
    untied = failed("tied-weights", "weights that are not tied: measured 1")
    assert in_causal_order([*frozen, untied])[0].law == "tied-weights"


def causes_of_two_cells() -> Report:
    """Return a report on a trainer whose gradients are wrong on two cells for one reason."""
    failures = {
        DP2: [failed("gradients", "gradient at step 0 of a"), failed("loss", "loss at step 1")],
        ACC2: [failed("gradients", "gradient at step 0 of a", ACC2), failed("clipping", "step 0", ACC2)],
    }
    found = [
        CellCause(cell=cell, key="rank-means", sentence=f"your gradients are wrong on {cell}", where="my.py:3 (step)")
        for cell in failures
    ]
    cases = [each for on_cell in failures.values() for each in on_cell]
    facts = TrainerFacts(name="mine", given="mine", versions={}, shims=[], policies=[], faults=[])
    return replace(report(*cases), trainer=facts, causes=merged(found, failures))


def test_cells_with_one_cause_are_told_once() -> None:
    judged = causes_of_two_cells()
    (cause,) = judged.causes
    assert (cause.cells, cause.law, cause.follows) == ([DP2, ACC2], "gradients", ["clipping", "loss"])
    (explanation,) = explain(judged)
    assert explanation.first.id == f"gradients/{DP2}"
    assert explanation.case_count == 4
    text = "\n".join(terminal_lines(judged, "report: here"))
    assert f"1. your gradients are wrong on {DP2}\n  where: my.py:3 (step)\n  on {DP2}, {ACC2}\n" in text
    assert "  and 2 laws that follow: clipping, loss\n" in text


def test_failures_without_a_known_cause_are_told_by_cell_in_the_order_of_laws() -> None:
    first, second = explain(replace(causes_of_two_cells(), causes=[]))
    assert {first.first.cell, second.first.cell} == {DP2, ACC2}
    assert [each.law for each in (first, second)] == ["gradients", "gradients"]


def test_frames_of_packages_are_cut_short_and_those_of_the_author_are_not() -> None:
    own = '  File "/home/me/my.py", line 3, in step\n    model(x)\n    ^^^^^^^^'
    torch = "\n".join(f'  File "/x/site-packages/torch/nn/{name}.py", line 1, in f\n    f()' for name in "abcde")
    told = f"Traceback (most recent call last):\n{own}\n{torch}\nValueError: no"
    cause = replace(causes_of_two_cells().causes[0], traceback=told)
    assert cause.short_traceback == [
        "Traceback (most recent call last):",
        *own.splitlines(),
        "  ... 4 frames of installed packages",
        '  File "/x/site-packages/torch/nn/e.py", line 1, in f',
        "    f()",
        "ValueError: no",
    ]


def test_a_fault_whose_run_raised_or_whose_laws_fail_already_is_not_blind() -> None:
    seen = [
        FaultSeen(fault="local-norm", cell=DP2, laws=[], raised="rank 0 raised KeyError: 'x' (my.py:3)"),
        FaultSeen(fault="stale-shard", cell=DP2, laws=[], failing_already=["gradients"]),
        FaultSeen(fault="parameters-frozen", cell=DP2, laws=[]),
    ]
    facts = TrainerFacts(name="mine", given="mine", versions={}, shims=[], policies=[], faults=seen)
    assert facts.blind_to == [f"parameters-frozen on {DP2}"]
    lines = "\n".join(trainer_lines(facts))
    assert "fault local-norm: not known, the run with the fault did not finish: rank 0 raised KeyError" in lines
    assert "fault stale-shard: not known, gradients fail without the fault already" in lines
    assert "fault parameters-frozen: NO LAW SEES IT" in lines
