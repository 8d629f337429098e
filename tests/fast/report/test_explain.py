"""Failures explained: groups of one cause, names of ratios, axes that tell cells apart, and known faults."""

import math
from typing import Any

import msgspec
import pytest

from conformance.judge.measurements import Measurement
from conformance.plan.cells import Cell
from conformance.report.explain import Explanation, explain, summary
from conformance.report.ratios import ratio_names
from conformance.report.schema import CaseResult, Report
from tests.support.sample_reports import case, deviation, location, report

DP2, DP4, TP2, DP2_TP2, HSDP = (f"{mesh}-fp32-default-meta" for mesh in ("dp2", "dp4", "tp2", "dp2-tp2", "hsdp2x2"))
WEIGHT = "layers.0.attention.wq.weight"


def off(ratio: float | None, at: str = WEIGHT) -> Measurement:
    return msgspec.structs.replace(deviation(1.0), ratio=ratio, at=at)


def failing(name: str, ratio: float | None = None, at: str = WEIGHT, verdict: str = "fail") -> CaseResult:
    return case(name, verdict, gradient=off(ratio, at), loss=deviation(0.0))


def explanations(shown: Report) -> list[Explanation]:
    return [each for explanation in explain(shown) for each in explanation.with_related]


def only(shown: Report) -> Explanation:
    (explanation,) = explanations(shown)
    return explanation


def test_cases_of_one_ratio_are_a_group_of_all_tensors() -> None:
    cases = [
        failing(f"PAR-1/{DP2}-sgd-noclip", 2.0, "layers.0.attention.wk.bias"),
        failing(f"PAR-1/{DP2}", 2.0000004, "layers.11.attention.wq.bias"),
        failing(f"PAR-2/{DP2}", 2.0),
    ]
    drifted = [case(f"MEM-1/{DP2}-seed{n}", "quality-warning") for n in range(1, 4)]
    harmless = [case(f"PAR-3/{verdict}", verdict) for verdict in ("pass", "unsupported", "waived", "not-run")]
    group, other, drift = explanations(report(*harmless, *drifted, *cases))
    assert (group.law, group.first.verdict, other.law) == ("PAR-1", "fail", "PAR-2")
    assert [c.cell for c in group.cases] == [DP2, f"{DP2}-sgd-noclip"], "the simplest cell first"
    assert group.tensor == "layers.*.attention.*.bias"
    assert group.ratio == pytest.approx(2.0)
    assert drift.first.verdict == "quality-warning", "metrics that drifted come last"


def test_a_size_that_is_the_ratio_in_every_cell_is_the_cause() -> None:
    group = only(report(failing(f"PAR-1/{DP2}", 2.0), failing(f"PAR-1/{DP4}", 4.0), failing(f"PAR-1/{HSDP}", 2.0)))
    assert (group.ratio, group.ratio_names) == (None, ["dp_shard"])


def test_other_ratios_are_other_groups() -> None:
    groups = explanations(report(*(failing(f"PAR-1/{DP2}-seed{n}", 2.0) for n in (1, 2)), failing(f"PAR-1/{DP2}", 2.1)))
    assert [(len(group.cases), group.ratio, group.ratio_names) for group in groups] == [
        (2, 2.0, ["dp_shard", "dp", "world"]),
        (1, 2.1, []),
    ]


def test_sizes_of_cells_that_pass_are_no_cause_unless_none_is_left() -> None:
    assert only(report(failing(f"PAR-1/{DP2}", 2.0), case(f"PAR-1/{TP2}"))).ratio_names == ["dp_shard", "dp"]
    both = report(failing(f"PAR-1/{DP2}-acc2", 2.0), case(f"PAR-1/{DP2}"))
    assert only(both).ratio_names == ["accumulation"]
    assert only(report(failing(f"PAR-1/{DP2}", 0.0))).ratio_names == []
    unknown = only(report(failing("PAR-1/a", 2.0), failing(f"PAR-1/{DP2}", 2.0)))
    assert ([c.cell for c in unknown.cases], unknown.ratio, unknown.ratio_names) == ([DP2, "a"], 2.0, [])
    masked = report(failing(f"PAR-1/{DP2}", 2.0), case(f"PAR-1/{DP2}-sgd"))
    assert only(masked).ratio_names == ["dp_shard", "dp", "world"]


@pytest.mark.parametrize(
    ("mesh", "ratio", "names"),
    [
        ("dp2-tp4", 2.0, ["dp_shard", "dp", "sqrt(tp)"]),
        ("dp2-tp4", 0.25, ["1/tp"]),
        ("tp2", 1 / math.sqrt(2), ["1/sqrt(tp)", "1/sqrt(world)"]),
        ("hsdp2x4", 8.0, ["dp", "world"]),
        ("hsdp2x4", 3.0, []),
        ("hsdp2x4", -2.0, []),
        ("dp1", 1.5, []),
    ],
)
def test_names_of_ratios(mesh: str, ratio: float, names: list[str]) -> None:
    assert ratio_names(ratio, Cell(mesh=mesh).facts()) == names


def test_without_a_common_ratio_the_tensor_is_the_cause() -> None:
    ratios = (3.0, 5.0, 7.0)
    embedding = "tok_embeddings.weight"
    cases = [failing(f"PAR-1/{DP2}-seed{n}", ratio) for n, ratio in enumerate(ratios, 1)]
    group, other = explanations(report(*cases, failing(f"PAR-1/{DP2}", None, embedding)))
    assert (len(group.cases), group.ratio, group.tensor) == (3, None, "layers.*.attention.wq.weight")
    assert (len(other.cases), other.ratio, other.tensor) == (1, None, embedding)
    assert only(report(failing(f"CLIP-1/{DP2}", 2.0, "step 1"))).tensor == "", "a metric of no tensor"


def test_a_run_that_did_not_finish_fails_several_laws_for_one_cause() -> None:
    cases = [
        msgspec.structs.replace(case(f"{law}/{DP2}", "crash"), reason=f"rank 1 died in step {number}")
        for number, law in enumerate(("PAR-1", "PAR-5"))
    ]
    assert (only(report(*cases)).law, only(report(*cases)).tensor) == ("PAR-1, PAR-5", "")


def test_unexpected_passes_are_grouped_by_issue() -> None:
    passes = [
        msgspec.structs.replace(case(f"CLIP-{n}/{DP2}", "unexpected-pass"), reason=f"although issues/{issue} is waived")
        for n, issue in ((4, 1), (6, 1), (7, 2))
    ]
    assert [group.law for group in explanations(report(*passes))] == ["CLIP-4, CLIP-6", "CLIP-7"]


def test_axis_values_that_failing_cells_share_and_no_passing_cell_has() -> None:
    fails = [failing(f"PAR-1/{DP2}-offloadcpu"), failing(f"PAR-1/{DP4}-offloadcpu-sgd")]
    unsupported, another_law = case(f"PAR-1/{DP2}-offloadcpu-pinned", "unsupported"), case(f"PAR-5/{DP2}-offloadcpu")
    shown = report(*fails, case(f"PAR-1/{DP2}"), unsupported, another_law)
    assert only(shown).shared == {"offload": "cpu"}
    assert only(report(*fails)).shared == {}, "nothing passes: nothing can be told apart"
    assert only(report(failing(f"PAR-1/{DP2}"), case(f"PAR-1/{DP2}-nosp"))).shared == {"sequence_parallel": "true"}


def test_sizes_of_the_mesh_tell_cells_apart_if_no_axis_does() -> None:
    shown = report(failing(f"PAR-1/{DP2_TP2}"), failing(f"PAR-1/{TP2}"), case(f"PAR-1/{DP2}"), case(f"PAR-1/{DP4}"))
    assert only(shown).shared == {"tp": "2"}


def summed_gradients(*, integers: str) -> Report:
    """Return failures of `grads-summed`, with any verdict on the integer model."""
    integer = f"PAR-9/{DP2}-integer-sgd-noclip-steps1"
    resumed = [f"CKPT-1/{DP2}-from.same", f"CKPT-3/{DP2}-from.same-async"]
    others = ["PAR-2/dp2-bf16mixed-default-meta", "STREAM-3/dp2-fp32-default-full-fsdp1"]
    shown = [failing(name, 2.0) for name in (f"PAR-1/{DP2}-sgd", *resumed, *others)]
    return report(*shown, failing(integer, verdict=integers))


def test_known_faults_have_the_laws_that_fail() -> None:
    groups = {group.law: group.defects for group in explanations(summed_gradients(integers="fail"))}
    assert groups["PAR-1"] == ["grads-summed", "loss-dp-factor-forgotten"]
    assert groups["STREAM-3"] == ["grads-summed"]


def test_a_law_that_passes_speaks_against_a_known_fault() -> None:
    for group in explanations(summed_gradients(integers="pass")):
        assert "grads-summed" not in group.defects


def test_a_hang_is_no_known_fault_that_ends() -> None:
    hangs = report(case("CLIP-1/dp2-tp2-fp32-default-meta-norminf", "timeout"))
    assert only(hangs).defects == ["clip-order-of-ranks"]
    assert only(report(case(f"PAR-1/{DP2}-sgd", "timeout"))).defects == ["conditional-param-use-hang"]


class Incomparable(CaseResult, frozen=True, kw_only=True):
    """Case that must not be compared field by field, which takes a day for the failures of a broken night."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    __hash__ = None  # type: ignore[assignment]


def test_cases_and_groups_are_told_apart_without_comparing_them() -> None:
    fields = [
        msgspec.structs.asdict(failing(f"{law}/{DP2}-seed{n}", ratio))
        for law in ("PAR-1", "PAR-2")
        for n, ratio in enumerate((2.0, 2.0, 3.0, 3.0, 5.0), 1)
    ]
    causes = explain(report(*(Incomparable(**each) for each in fields)))
    assert sum(cause.case_count for cause in causes) == len(fields)
    assert [len(cause.with_related) for cause in causes] == [2, 1, 1, 1, 1]


# First wrong places


def test_explanations_of_one_place_are_one_and_those_of_one_ratio_stay_together() -> None:
    """The one of most cases is first, and has the place."""
    summed = [failing(f"{law}/{DP2}", 2.0) for law in ("PAR-1", "PAR-2")]
    cases = [*summed, *(failing(f"{law}/{DP2}") for law in ("CLIP-1", "OPT-1", "MEM-1"))]
    places = [location(f"{law}/{DP2}") for law in ("PAR-1", "CLIP-1", "OPT-1")]
    first, other = explain(report(*cases, locations=[*places, location(f"MEM-1/{DP2}", stage="memory")]))
    assert [each.law for each in first.with_related] == ["PAR-1", "PAR-2", "CLIP-1", "OPT-1"]
    assert [each.law for each in first.same_place] == ["CLIP-1", "OPT-1"]
    assert [each.location is not None for each in first.with_related] == [True, False, False, False]
    assert first.location == places[0]
    assert (other.law, other.location is not None, other.same_place) == ("MEM-1", True, [])
    assert summary([first, other]) == (
        "5 cases of 5 laws; in 2 of them measured is 2.000 times expected = dp_shard or dp or world; first wrong in 4 "
        "of them: backward: layers.1.attention.wo, gradient of its input"
    )


@pytest.mark.parametrize("other", [{"stage": "forward"}, {"name": "norm"}, {"quantity": "output"}, {"step": 1}])
def test_places_that_differ_are_told_apart(other: dict[str, Any]) -> None:
    cases = [failing(f"{law}/{DP2}") for law in ("CLIP-1", "OPT-1")]
    shown = report(*cases, locations=[location(cases[0].id), location(cases[1].id, **other)])
    assert [each.law for each in explain(shown)] == ["CLIP-1", "OPT-1"]
    alike = report(*cases, locations=[location(each.id, ranks_text=each.law, cell=each.law) for each in cases])
    assert len(explain(alike)) == 1, "ranks and cells do not tell places apart"
