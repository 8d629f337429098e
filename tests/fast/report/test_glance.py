"""First glance at a report: findings, their order, and the cases to which they lead."""

from msgspec.structs import replace

from conformance.report.explain import explain
from conformance.report.glance import MAX_FINDINGS, Finding, findings
from conformance.report.schema import CaseResult
from conformance.report.sections import times_text
from tests.support.sample_reports import case, count, deviation, location, report

CELL = "dp2-fp32-default-meta"


def told(*cases: CaseResult) -> list[Finding]:
    places = [location(cases[0].id)] if cases[0].verdict == "fail" else []
    return findings(cases, explain(report(*cases, locations=places)))


def test_causes_come_before_waived_faults_and_the_narrowest_margin() -> None:
    wrong = case(f"PAR-1/{CELL}", "fail", loss=replace(deviation(1e-3), ratio=2.0))
    waived = replace(case(f"CLIP-4/{CELL}", "waived"), reason="https://issues/1: local; measured 3")
    other = replace(waived, id=f"CLIP-4/{CELL}-sgd", reason="https://issues/1: another fault; measured 3")
    right = case(f"PAR-2/{CELL}", loss=deviation(2e-6), tensors=count(3))
    cause, fault, margin = told(wrong, waived, right)
    assert [each.text for each in told(waived, other)] == ["https://issues/1: local", "https://issues/1: another fault"]
    assert (cause.verdict, cause.subject, cause.anchor) == ("fail", "PAR-1, 1 case", "cause-1")
    assert cause.text.startswith("measured is 2.000 times expected = dp_shard or dp")
    assert cause.text.endswith("; first wrong: backward: layers.1.attention.wo, gradient of its input")
    assert fault == Finding("waived", "CLIP-4, 1 case", "https://issues/1: local", waived.id)
    assert margin.text == "the narrowest margin: 20 % of the bound: loss at layers.0.attention.wk.bias"
    assert margin.anchor == right.id


def test_there_are_at_most_three_and_none_without_anything_to_tell() -> None:
    assert len(told(*(case(f"PAR-{law}/{CELL}", "fail", loss=deviation(1e-3)) for law in range(9)))) == MAX_FINDINGS
    assert told(case(f"PAR-1/{CELL}", tensors=count(3))) == []


def test_multiples_of_a_bound_have_three_digits_and_no_exponent() -> None:
    assert [times_text(ratio) for ratio in (1.2345, 51_345.0, 1e9)] == [
        "1.23 times",
        "51,300 times",
        "over 1,000,000 times",
    ]
