"""report.html, from reports that no session has written."""

import html.parser
from pathlib import Path

import msgspec
import pytest

from conformance.__main__ import main
from conformance.instruments.communication import Communication
from conformance.judge.measurements import Measurement
from conformance.report.charts import bounds_bar, loss_curve, memory_bar, timeline
from conformance.report.html import report_page
from tests.report.test_diff import FACTS, GATHER, bytes_of, case, deviation, report

REPORT = report(
    case("PAR-1/dp2", loss=deviation(1e-6)),
    case("PAR-1/dp4", "fail", loss=deviation(1e-3)),
    case("MEM-1/dp2", **{"peak of forward": bytes_of(3 << 20, lower=3 << 20, upper=4 << 20)}),  # type: ignore[arg-type]
    case("STREAM-2/dp2", "unsupported"),
    cells={"dp2": FACTS},
    verdicts={"pass": 2, "fail": 1, "unsupported": 1},
    exit_code=1,
)


class Outline(html.parser.HTMLParser):
    """Which tags are opened and not closed, ids, and addresses that would be loaded."""

    EMPTY = ("meta", "input", "br", "rect", "polyline")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.EMPTY:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name == "href" and (value or "").startswith("#"):
                self.links.append((value or "")[1:])
            elif name in ("src", "href"):
                self.loads.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag


def outline(page: str) -> Outline:
    found = Outline()
    found.feed(page)
    return found


def test_one_file_with_all_cases() -> None:
    page = report_page(REPORT)
    found = outline(page)
    assert (found.open, found.loads) == ([], [])
    assert "http" not in page
    assert {one.id for one in REPORT.cases} <= set(found.ids)
    assert set(found.links) <= set(found.ids)
    assert len(found.ids) == len(set(found.ids))
    for part in ("not conformant", "why fail", "why unsupported", "torch 2.13.0", "4 x forward all_gather dp_shard"):
        assert part in page
    assert "forward 3.00 MiB, model 3.00" in page


def test_what_a_report_says_is_text() -> None:
    evil = msgspec.structs.replace(REPORT.cases[1], reason="<script>alert(1)</script>")
    assert "<script>alert" not in report_page(msgspec.structs.replace(REPORT, cases=[evil]))


@pytest.mark.parametrize(
    ("figure", "label"),
    [
        (Measurement(5.0, 0.0, 10.0, ""), "inside"),
        (Measurement(11.0, 0.0, 10.0, ""), "outside"),
        (Measurement(3.0, 3.0, 3.0, ""), "inside"),
        (Measurement(2.0, 3.0, 3.0, ""), "outside"),
        (Measurement(None, 0.0, 1.0, ""), None),
        (Measurement(1.0, None, 1.0, ""), None),
    ],
)
def test_a_value_beside_its_bounds(figure: Measurement, label: str | None) -> None:
    bar = bounds_bar(figure)
    assert (label is None) == (bar == "")
    assert label is None or f'aria-label="{label}"' in bar


def test_curves_and_bars() -> None:
    assert 'points="10,4.0 25,13.0 40,22.0"' in loss_curve([3.0, 2.0, 1.0])
    assert loss_curve([1.0, None]) == loss_curve([]) == ""
    assert "22.0" in loss_curve([2.0])
    beside = loss_curve([3.0, 1.0], [3.0, 2.0])
    assert beside.count("<polyline") == 2
    assert "1.0000, baseline to 2.0000" in beside
    assert loss_curve([1.0], [None]) == ""
    assert 'width="260.0"' in memory_bar({"forward": bytes_of(8, lower=4, upper=9)}, largest=8)


def test_collectives_in_their_order() -> None:
    reduce = msgspec.structs.replace(GATHER, phase="backward", kind="all_reduce", group="tp")
    picture = timeline([GATHER, GATHER, reduce])
    assert picture.count("<title>") == 3
    assert picture.index(">dp_shard</text>") < picture.index(">tp</text>")
    assert "<title>backward all_reduce tp, 250 B</title>" in picture
    assert timeline([]) == ""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(REPORT))
    assert main(["html", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").read_text() == report_page(REPORT)
    assert main(["html", str(tmp_path), "--baseline", str(tmp_path)]) == 0
    assert "baseline to 3.0000" in (tmp_path / "report.html").read_text()
    assert main(["html", str(tmp_path / "none")]) == 2


def test_an_empty_report_has_a_page() -> None:
    assert outline(report_page(report())).open == []


def test_communication_stands_beside_the_rate_of_tokens() -> None:
    found = Communication(step_s=0.05, busy_s=0.02, exposed_s=0.01)
    shown = msgspec.structs.replace(FACTS, communication=found)
    page = report_page(msgspec.structs.replace(REPORT, cells={"dp2": shown}))
    assert "<td>1</td><td>10.0 of 50.0 ms, 20%</td>" in page
    assert "<td>1</td><td></td>" in report_page(REPORT)
