"""report.html, from reports that no session has written."""

import html.parser
from pathlib import Path

import msgspec
import pytest

from conformance.__main__ import main
from conformance.instruments.communication import Communication
from conformance.judge.measurements import Measurement
from conformance.report.charts import bar, bounds_bar, deviations, loss_curve, timeline
from conformance.report.diff import diff
from conformance.report.html import html_difference, html_report
from tests.support.sample_reports import FACTS, GATHER, bytes_of, case, count, deviation, report

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
    """Parser that collects open tags, ids, and addresses that a browser would load."""

    EMPTY = ("meta", "input", "br", "rect", "polyline", "line", "circle")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.headers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.EMPTY:
            self.open.append(tag)
        if tag == "th":
            self.headers.append(dict(attrs).get("scope") or "")
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name == "href" and (value or "").startswith("#axis="):
                continue
            if name == "href" and (value or "").startswith("#"):
                self.links.append((value or "")[1:])
            elif name in ("src", "href"):
                self.loads.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag


def outline(text: str) -> Outline:
    parser = Outline()
    parser.feed(text)
    return parser


def test_one_file_with_all_cases() -> None:
    text = html_report(REPORT)
    parser = outline(text)
    assert (parser.open, parser.loads) == ([], [])
    assert {result.id for result in REPORT.cases} <= set(parser.ids)
    assert set(parser.links) <= set(parser.ids)
    assert len(parser.ids) == len(set(parser.ids))
    for told in ("NOT CONFORMANT", "why fail", "why unsupported", "torch 2.13.0", "4 x forward all_gather dp_shard"):
        assert told in text
    assert "3.000 MiB, lower bound +0 B, upper bound -1,048,576 B" in text


def test_sections_in_the_order_in_which_one_decides() -> None:
    text = html_report(REPORT)
    sections = ["<h1>", *(f'id="{name}"' for name in ("failed", "laws", "axes", "memory", "losses", "grid", "facts"))]
    places = [text.index(section) for section in sections]
    assert places == sorted(places)


def test_what_failed_has_the_law_the_reason_and_the_command() -> None:
    text = html_report(REPORT)
    failed = text[text.index('id="failed"') : text.index('id="laws"')]
    for told in ("PAR-1", "It MUST.", "why fail", "1 case", DP4):
        assert told in failed
    assert "why unsupported" not in failed
    passed = msgspec.structs.replace(REPORT, cases=REPORT.cases[:1])
    assert "<h2>What failed</h2>\n<p>Nothing.</p>" in html_report(passed)


def test_causes_after_the_tenth_are_folded() -> None:
    cases = [case(f"PAR-{number}/dp2", "fail", loss=deviation(1e-3)) for number in range(1, 13)]
    text = html_report(report(*cases, verdicts={"fail": 12}, exit_code=1))
    assert "<summary>2 more causes</summary>" in text
    assert text.count('<article class="group fail">') == 12


def test_tables_say_what_their_headers_head() -> None:
    parser = outline(html_report(REPORT))
    assert parser.headers
    assert all(scope for scope in parser.headers)


def test_a_metric_shows_where_it_was_worst_and_the_derivation_of_its_bound() -> None:
    """Folded away, unless it is outside of its bounds."""
    told = (
        "<small>at layers.0.attention.wk.bias"
        "<br>bound 1e-05 = u (3 F + sqrt(tokens)); u = 5.96e-08, F = 105, tokens = 256</small></details>"
    )
    text = html_report(REPORT)
    assert text.count(told) == 2
    assert text.count('<details class="metric">') == text.count('<details class="metric" open>') == 1


def test_what_a_report_says_is_text() -> None:
    script = "<script>alert(1)</script>"
    evil = msgspec.structs.replace(
        REPORT.cases[1], reason=script, measured={script: msgspec.structs.replace(deviation(1.0), at=script)}
    )
    memory = msgspec.structs.replace(REPORT.cases[2], measured={f"peak of {script}": bytes_of(1, lower=1, upper=2)})
    collective = msgspec.structs.replace(GATHER, phase=script, group=script)
    facts = msgspec.structs.replace(FACTS, schedule=[collective])
    assert script not in html_report(msgspec.structs.replace(REPORT, cases=[evil, memory], cells={script: facts}))


@pytest.mark.parametrize(
    ("metric", "label"),
    [
        (bytes_of(5, lower=0, upper=10), "inside"),
        (bytes_of(11, lower=0, upper=10), "outside"),
        (count(3), "inside"),
        (msgspec.structs.replace(count(3), value=2.0), "outside"),
        (deviation(None), None),
        (bytes_of(1, upper=1), None),
    ],
)
def test_a_value_between_its_bounds(metric: Measurement, label: str | None) -> None:
    bar = bounds_bar(metric)
    assert (label is None) == (bar == "")
    assert label is None or f'aria-label="{label}"' in bar


def test_curves_and_bars() -> None:
    assert 'points="10,4.0 25,13.0 40,22.0"' in loss_curve([3.0, 2.0, 1.0])
    assert loss_curve([1.0, None]) == loss_curve([]) == ""
    assert "22.0" in loss_curve([2.0])
    both = loss_curve([3.0, 1.0], [3.0, 2.0])
    assert both.count("<polyline") == 2
    assert "1.0000, baseline to 2.0000" in both
    assert loss_curve([1.0], [None]) == ""


def test_a_bar_has_both_bounds_drawn_in() -> None:
    svg = bar(bytes_of(8, lower=4, upper=9), largest=16)
    assert 'width="50.00"' in svg
    assert '<line x1="25.00" x2="25.00"' in svg
    assert svg.index('x1="56.25"') < svg.index("stroke-dasharray")
    assert "--bad" not in svg
    assert "--bad" in bar(bytes_of(10, lower=4, upper=9), largest=16)
    assert 'width="0.00"' in bar(bytes_of(0, lower=0, upper=0), largest=0)


def test_deviations_lie_below_the_line_of_their_bound_or_are_red() -> None:
    chart = deviations({"loss of step 0": deviation(1e-6), "loss of step 1": deviation(1e-3)})
    assert chart.count("<circle") == 2
    assert chart.count("--good") == chart.count("--bad") == 1
    assert "<title>loss of step 1: 0.001 relative Frobenius deviation, bounds 0 to 1e-05</title>" in chart
    assert deviations({"loss": deviation(None)}).count("--bad") == 1
    assert deviations({"tensors": count(0)}) == ""


def test_collectives_in_their_order() -> None:
    reduce = msgspec.structs.replace(GATHER, phase="backward", kind="all_reduce", group="tp")
    chart = timeline([GATHER, GATHER, reduce])
    assert chart.count("<title>") == 3
    assert chart.index(">dp_shard</text>") < chart.index(">tp</text>")
    assert "<title>backward all_reduce tp, 250 B</title>" in chart
    assert timeline([]) == ""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(REPORT))
    assert main(["html", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").read_text() == html_report(REPORT)
    assert main(["html", str(tmp_path), "--baseline", str(tmp_path)]) == 0
    assert "baseline to 3.0000" in (tmp_path / "report.html").read_text()
    assert main(["html", str(tmp_path / "none")]) == 4


def test_an_empty_report_is_html() -> None:
    assert outline(html_report(report())).open == []


def test_the_difference_of_two_reports_is_html() -> None:
    difference = diff(REPORT, msgspec.structs.replace(REPORT, cases=[case("PAR-1/dp2", "fail")]))
    text = html_difference(difference)
    parser = outline(text)
    assert (parser.open, parser.loads) == ([], [])
    assert text.startswith("<!doctype html>")


def test_exposed_communication_is_shown_next_to_the_rate_of_tokens() -> None:
    communication = Communication(step_s=0.05, busy_s=0.02, exposed_s=0.01)
    shown = msgspec.structs.replace(FACTS, communication=communication)
    text = html_report(msgspec.structs.replace(REPORT, cells={DP2: shown}))
    assert "<td>1</td><td>10.0 of 50.0 ms, 20%</td>" in text
    assert "<td>1</td><td></td>" in html_report(REPORT)
