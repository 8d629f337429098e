"""report.html and the data of its sections, from reports that no session has written."""

import html.parser
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from markupsafe import Markup
from msgspec.structs import replace

from conformance.__main__ import main
from conformance.instruments.communication import Communication
from conformance.judge.measurements import Measurement
from conformance.report.charts import bar, bounds_bar, deviations, loss_curve
from conformance.report.html import html_report, linked
from conformance.report.schema import verdict_counts
from conformance.report.sections import (
    axes_of,
    axis_map,
    bytes_text,
    families_of,
    filter_tokens,
    loss_plots,
    memory_plots,
    narrowest_margin,
    traffic_plots,
)
from tests.support.sample_reports import (
    FACTS,
    GATHER,
    bytes_of,
    case,
    count,
    deviation,
    location,
    model_tree,
    ratio,
    report,
)

ISSUE = "https://github.com/pytorch/pytorch/issues/166638"
DP2, DP4 = "dp2-fp32-default-meta", "dp4-tp2-fp32-default-meta"
REPORT = report(
    case(f"PAR-1/{DP2}", loss=deviation(1e-6)),
    case(f"PAR-1/{DP4}", "fail", loss=deviation(1e-3)),
    case(f"MEM-1/{DP2}", **{"peak of forward": bytes_of(3 << 20, lower=3 << 20, upper=4 << 20)}),  # type: ignore[arg-type]
    case(f"STREAM-2/{DP2}", "unsupported"),
    cells={DP2: FACTS},
    verdicts={"pass": 2, "fail": 1, "unsupported": 1},
    exit_code=1,
)


class Outline(html.parser.HTMLParser):
    """Parser that collects open tags, and (tag, attribute, value) of all tags."""

    EMPTY = ("meta", "link", "input", "br", "rect", "polyline", "line", "circle")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open += [tag] * (tag not in self.EMPTY)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def values(self, *names: str) -> list[str]:
        """Return the values of attributes, without links to filters of the page itself."""
        found = [value for _, name, value in self.attributes if name in names]
        return [value for value in found if not value.startswith("#axis=")]


def test_one_file_with_all_cases() -> None:
    text = html_report(REPORT)
    parser = Outline(text)
    assert parser.open == Outline(html_report(report())).open == []
    ids, links = parser.values("id"), parser.values("href", "src")
    assert all(link.startswith("#") for link in links), "a browser loads nothing else"
    assert {result.id for result in REPORT.cases} | {link[1:] for link in links} <= set(ids)
    assert len(ids) == len(set(ids))
    assert text.count("<th") - text.count("<thead") == len(parser.values("scope")) > 0
    told = ("NOT CONFORMANT", "why fail", "It MUST.", "why unsupported", "torch 2.13.0", "4 x forward all_gather dp_")
    assert all(words in text for words in told)
    assert "3.000 MiB, lower bound +0 B, upper bound -1,048,576 B" in text
    passed = replace(REPORT, cases=REPORT.cases[:1])
    assert "<h2>What failed</h2>\n<p>Nothing.</p>" in html_report(passed)


def test_causes_after_the_tenth_are_folded() -> None:
    cases = [case(f"PAR-{number}/dp2", "fail", loss=deviation(1e-3)) for number in range(1, 13)]
    text = html_report(report(*cases, verdicts={"fail": 12}, exit_code=1))
    assert "<summary>2 more causes</summary>" in text
    assert text.count('<article class="group fail"') == 12


def test_a_metric_shows_where_it_was_worst_and_the_derivation_of_its_bound() -> None:
    """Folded away, unless it is outside of its bounds."""
    bound = "bound 1e-05 = u (3 F + sqrt(tokens)); u = 5.96e-08, F = 105, tokens = 256"
    text = html_report(REPORT)
    assert text.count(f"<small>at layers.0.attention.wk.bias<br>{bound}</small></details>") == 2
    assert text.count('<details class="metric">') == text.count('<details class="metric" open>') == 1


def located(**other: Any) -> str:
    cases = [case(f"{law}/{DP2}", "fail", loss=deviation(1e-3)) for law in ("PAR-1", "CLIP-1")]
    return html_report(report(*cases, locations=[location(each.id, **other) for each in cases], verdicts={"fail": 2}))


def test_a_first_wrong_place_is_shown_in_the_tree_of_modules() -> None:
    """Signs and words tell the states apart, not colours alone; the way to the place is open."""
    text = located(tree=model_tree(layers=80))
    assert Outline(text).open == []
    assert text.count('<figure class="tree">') == text.count("<li>first wrong: backward: layers.1.attention.wo") == 1
    assert "<summary>1 more group with the same first wrong place</summary>" in text
    wrong = "<code>wo</code> wrong: <strong>gradient of its input (backward)</strong>"
    assert f'<span class="mark">\N{BALLOT X}</span> {wrong}' in text
    assert '<span class="mark">\N{CHECK MARK}</span> <code>layers.2 ... layers.79</code> right' in text
    tree = text[text.index('<figure class="tree">') : text.index("</figure>")]
    opened = re.findall(r"<details open><summary>\s*<span.*?<code>(.*?)</code>", tree)
    assert (opened, tree.count('<li class="wrong">')) == (["model", "layers.1", "attention"], 1)
    assert tree.count("<li") < 30
    assert '<figure class="tree">' not in located(tree={}), "no picture without a tree"
    colours = dict(re.findall(r"--(right|wrong|follows|none): (#\w+);", text[: text.index("@media")]))
    assert len(set(colours.values())) == 4


def test_markup_in_a_report_is_text() -> None:
    script = "<script>alert(1)</script>"
    evil = replace(REPORT.cases[1], reason=script, measured={script: replace(deviation(1.0), at=script)})
    memory = replace(REPORT.cases[2], measured={f"peak of {script}": bytes_of(1, lower=1, upper=2)})
    facts = replace(FACTS, schedule=[replace(GATHER, phase=script, group=script)])
    assert script not in html_report(replace(REPORT, cases=[evil, memory], cells={script: facts}))
    assert script not in located(name=script, quantity=script, cell=script, tree={script: "wrong"})


def test_bars_have_their_bounds_drawn_in_and_are_red_outside() -> None:
    places = {"inside": [bytes_of(5, lower=0, upper=10), count(3)], "outside": [bytes_of(11, lower=0, upper=10)]}
    places["outside"].append(replace(count(3), value=2.0))
    for place, metrics in places.items():
        assert all(f'aria-label="{place}"' in bounds_bar(metric) for metric in metrics)
    assert bounds_bar(deviation(None)) == bounds_bar(bytes_of(1, upper=1)) == ""
    svg = bar(bytes_of(8, lower=4, upper=9), largest=16)
    assert 'width="50.00"' in svg
    assert '<line x1="25.00" x2="25.00"' in svg
    assert svg.index('x1="56.25"') < svg.index("stroke-dasharray")
    assert ("--bad" in svg, "--bad" in bar(bytes_of(10, lower=4, upper=9), largest=16)) == (False, True)
    assert 'width="0.00"' in bar(bytes_of(0, lower=0, upper=0), largest=0)


def test_curves_of_losses_and_points_of_deviations() -> None:
    assert 'points="10,4.0 25,13.0 40,22.0"' in loss_curve([3.0, 2.0, 1.0])
    assert loss_curve([1.0, None]) == loss_curve([]) == loss_curve([1.0], [None]) == ""
    assert "22.0" in loss_curve([2.0])
    both = loss_curve([3.0, 1.0], [3.0, 2.0])
    assert both.count("<polyline") == 2
    assert "1.0000, baseline to 2.0000" in both
    chart = deviations({"loss of step 0": deviation(1e-6), "loss of step 1": deviation(1e-3)})
    assert [chart.count(mark) for mark in ("<circle", "--good", "--bad")] == [2, 1, 1]
    assert "<title>loss of step 1: 0.001 relative Frobenius deviation, bounds 0 to 1e-05</title>" in chart
    assert deviations({"loss": deviation(None)}).count("--bad") == 1
    assert deviations({"tensors": count(0)}) == ""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(REPORT))
    assert main(["html", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").read_text() == html_report(REPORT)
    assert main(["html", str(tmp_path), "--baseline", str(tmp_path)]) == 0
    assert "baseline to 3.0000" in (tmp_path / "report.html").read_text()
    assert main(["html", str(tmp_path / "none")]) == 4


def test_exposed_communication_is_shown_next_to_the_rate_of_tokens() -> None:
    communication = Communication(step_s=0.05, busy_s=0.02, exposed_s=0.01)
    shown = replace(FACTS, communication=communication)
    text = html_report(replace(REPORT, cells={DP2: shown}))
    assert "<td>1</td><td>10.0 of 50.0 ms, 20%</td>" in text
    assert "<td>1</td><td></td>" in html_report(REPORT)


# Sections as data


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
    by_name = {family.name: [law.id for law in family.laws] for family in families}
    assert list(by_name.items()) == [("MP", ["MP-1"]), ("PAR", ["PAR-2", "PAR-10"])]
    assert verdict_counts(families[1].cases) == {"pass": 2, "fail": 1}
    assert [law.is_bad for law in families[1].laws] == [True, False]


@pytest.mark.parametrize(
    ("metrics", "room"),
    [
        ([deviation(1e-6), deviation(4.3e-6)], "43 % of the bound"),
        ([deviation(1e-5)], "at the bound"),
        ([deviation(9.9999e-6)], "99.9 % of the bound"),
        ([deviation(4.3219e-6)], "43.2 % of the bound"),
        ([deviation(1e-12)], "under 0.01 % of the bound"),
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
    narrowest = narrowest_margin([case(f"PAR-1/{number}", loss=metric) for number, metric in enumerate(metrics)])
    assert narrowest.text == room
    if room == "43 % of the bound":
        assert (narrowest.metric, narrowest.case) == ("loss at layers.0.attention.wk.bias", "PAR-1/1")


def test_pairs_of_axes_that_cases_have_met() -> None:
    cases = [
        case("PAR-1/dp2-tp2-bf16mp-default-meta", "fail"),
        case("PAR-2/dp2-tp2-bf16mp-default-meta"),
        case("PAR-1/dp2-tp4-bf16mp-default-meta"),
        case("PAR-1/dp2-fp32-never-meta"),
        case("PAR-1/dp2-tp2-fp32-never-meta", "unsupported"),
        case("?/?", "crash"),
    ]
    found = axis_map(cases)
    assert found.axes == ["dp_shard", "tp", "precision", "reshard"]
    assert found.unknown == 1
    pairs = {(pair.first, pair.second): pair for _, row in found.rows for pair in row if pair}
    assert (pairs["precision", "tp"].judged, pairs["precision", "tp"].failed) == (3, 1)
    assert (pairs["dp_shard", "dp_shard"].judged, pairs["dp_shard", "dp_shard"].failed) == (4, 1)
    assert ("reshard", "tp") not in pairs, "never judged"


def test_filters_know_features_and_the_axes_that_differ() -> None:
    axes = axes_of("dp1-fp32-default-meta-nosp-compile") or {}
    assert (axes["tp"], axes["sequence_parallel"], axes["compile"]) == ("1", "false", "true")
    assert axes_of("?") is None
    tokens = filter_tokens([DP2, "dp2-tp2-fp32-default-meta", "?"])
    assert tokens == {DP2: ["tp=1", "dp_shard"], "dp2-tp2-fp32-default-meta": ["tp=2", "dp_shard", "tp"]}


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
    shown = [(plot.case.id, list(plot.metrics)) for plot in plots]
    assert shown == [("MEM-1/b", ["peak"]), ("MEM-1/a", ["peak of forward"])]
    assert bytes_text(plots[0].metrics["peak"]) == "5.000 MiB, lower bound +4,194,304 B, upper bound +1,048,576 B"
    (plot,) = traffic_plots(cases)
    assert bytes_text(plot.metrics["traffic"]) == "0.000 MiB, as modelled"


def test_losses_are_plotted_with_the_deviations_that_laws_have_bounded() -> None:
    cases = [case(f"PAR-1/{cell}", loss=deviation(value)) for cell, value in (("a", 1e-6), ("b", 1.0))]
    plots = loss_plots([*cases, case("OFF-1/a", losses=count(0))], {"a": FACTS}, {})
    assert [(plot.case.id, plot.losses) for plot in plots] == [("PAR-1/b", []), ("PAR-1/a", FACTS.losses)]
