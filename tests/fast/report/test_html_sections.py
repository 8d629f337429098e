"""Sections of report.html as data: links, margins of laws, the map of axes, plots."""

from typing import Any

import pytest
from markupsafe import Markup

from conformance.judge.measurements import Measurement
from conformance.report.axis_map import Tally, axes_of, axis_map, filter_tokens
from conformance.report.law_overview import families_of, narrowest_margin
from conformance.report.links import linked
from conformance.report.plots import loss_plots, memory_plots, traffic_plots
from tests.support.sample_reports import FACTS, bytes_of, case, count, deviation, ratio

ISSUE = "https://github.com/pytorch/pytorch/issues/166638"
CELL = "dp2-fp32-default-meta"


@pytest.mark.parametrize(
    ("text", "html"),
    [
        (f"see {ISSUE}: it", f'see <a href="{ISSUE}" rel="noreferrer">pytorch#166638</a>: it'),
        ("(pytorch#166638)", f'(<a href="{ISSUE}" rel="noreferrer">pytorch#166638</a>)'),
        ("at http://a.b/c?d=1&e.", 'at <a href="http://a.b/c?d=1&amp;e" rel="noreferrer">http://a.b/c?d=1&amp;e</a>.'),
        ("#12, issue 12, mypytorch#1", "#12, issue 12, mypytorch#1"),
        ("javascript:alert(1) file:///etc data:x", "javascript:alert(1) file:///etc data:x"),
        (
            'https://a.b/"onclick="x <b>',
            '<a href="https://a.b/" rel="noreferrer">https://a.b/</a>&#34;onclick=&#34;x &lt;b&gt;',
        ),
        ("", ""),
    ],
)
def test_addresses_and_issues_are_links_and_nothing_else(text: str, html: str) -> None:
    assert linked(text) == Markup(html)


def test_laws_by_family_in_the_order_of_their_numbers() -> None:
    families = families_of([case("PAR-10/a"), case("PAR-2/a", "fail"), case("MP-1/a"), case("PAR-2/b")])
    assert [(family.name, [law.id for law in family.laws]) for family in families] == [
        ("MP", ["MP-1"]),
        ("PAR", ["PAR-2", "PAR-10"]),
    ]
    assert families[1].verdicts == {"pass": 2, "fail": 1}
    assert [law.is_bad for law in families[1].laws] == [True, False]


@pytest.mark.parametrize(
    ("metrics", "room"),
    [
        ([deviation(1e-6), deviation(4.3e-6)], "43 % of the bound"),
        ([deviation(1e-3)], "100 times the bound"),
        ([deviation(None)], "outside"),
        ([ratio(1.8), deviation(1e-6)], "90 % of the bound"),
        ([count(3)], "exact"),
        ([count(3), deviation(0.0)], "0 % of the bound"),
        ([bytes_of(104, lower=100, upper=228)], "4 bytes above the lower bound"),
        ([bytes_of(220, lower=100, upper=228)], "8 bytes below the upper bound"),
        ([bytes_of(104)], ""),
        ([], ""),
    ],
)
def test_the_narrowest_margin(metrics: list[Measurement], room: str) -> None:
    cases = [case(f"PAR-1/{number}", loss=metric) for number, metric in enumerate(metrics)]
    assert narrowest_margin(cases).text == room


def test_the_narrowest_margin_names_metric_tensor_and_case() -> None:
    narrowest = narrowest_margin([case("PAR-1/a", loss=deviation(1e-6)), case("PAR-1/b", loss=deviation(2e-6))])
    assert (narrowest.metric, narrowest.case) == ("loss at layers.0.attention.wk.bias", "PAR-1/b")


def test_pairs_of_axes_that_cases_have_met() -> None:
    cases = [
        case("PAR-1/dp2-tp2-bf16mp-default-meta", "fail"),
        case("PAR-2/dp2-tp2-bf16mp-default-meta"),
        case("PAR-1/dp2-tp4-bf16mp-default-meta"),
        case("PAR-1/dp2-fp32-never-meta"),
        case("PAR-1/dp2-tp2-fp32-never-meta", "unsupported"),
        case("?/?", "crash"),
    ]
    map_ = axis_map(cases)
    assert map_.axes == ["dp_shard", "tp", "precision", "reshard"]
    assert map_.unknown == 1
    pairs = {(pair.first, pair.second): pair for _, row in map_.rows for pair in row if pair}
    assert pairs["precision", "tp"].tally == Tally(3, 1)
    assert pairs["precision", "tp"].by_values == {("bf16-mp", "2"): Tally(2, 1), ("bf16-mp", "4"): Tally(1, 0)}
    assert pairs["dp_shard", "dp_shard"].tally == Tally(4, 1)
    assert ("reshard", "tp") not in pairs, "never judged"


def test_axes_are_spelled_as_in_selections() -> None:
    axes = axes_of("dp1-fp32-default-meta-nosp-compile")
    assert axes
    assert (axes["tp"], axes["sequence_parallel"], axes["compile"]) == ("1", "false", "true")
    assert axes_of("?") is None


def test_filters_know_features_and_the_axes_that_differ() -> None:
    tokens = filter_tokens([CELL, "dp2-tp2-fp32-default-meta", "?"])
    assert tokens == {CELL: ["tp=1", "dp_shard"], "dp2-tp2-fp32-default-meta": ["tp=2", "dp_shard", "tp"]}


def test_bytes_with_two_bounds_are_plotted_and_those_outside_come_first() -> None:
    traffic = Measurement(kind="exact", value=2.0, lower=2.0, upper=2.0, unit="bytes that ranks contribute")
    memory: dict[str, Any] = {"peak of forward": bytes_of(3 << 20, lower=3 << 20, upper=4 << 20), "held": bytes_of(1)}
    too_much = bytes_of(5 << 20, lower=1 << 20, upper=4 << 20)
    cases = [
        case("MEM-1/a", **memory, tensors=count(1)),
        case("MP-4/a", traffic=traffic),
        case("MEM-1/b", peak=too_much),
    ]
    plots = memory_plots(cases)
    assert [(plot.case.id, [bar.name for bar in plot.bars]) for plot in plots] == [
        ("MEM-1/b", ["peak"]),
        ("MEM-1/a", ["peak of forward"]),
    ]
    assert plots[0].bars[0].label == "5.000 MiB, lower bound +4,194,304 B, upper bound +1,048,576 B"
    ((plot,),) = [traffic_plots(cases)]
    assert plot.bars[0].label == "0.000 MiB, the model's"


def test_losses_are_plotted_with_the_deviations_that_laws_have_bounded() -> None:
    cases = [
        case("PAR-1/a", loss=deviation(1e-6)),
        case("PAR-1/b", loss=deviation(1.0)),
        case("OFF-1/a", losses=count(0)),
    ]
    plots = loss_plots(cases, {"a": FACTS}, {})
    assert [(plot.case.id, plot.is_outside, bool(plot.curve)) for plot in plots] == [
        ("PAR-1/b", True, False),
        ("PAR-1/a", False, True),
    ]
