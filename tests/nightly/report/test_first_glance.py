"""First glance at reports of real sessions, in the browsers that are installed: verdict, subject and findings."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from conformance.report.html import html_report
from conformance.report.schema import Report
from tests.support.browser import BROWSERS, Browser, Chrome
from tests.support.page_checks import OPEN, texts_beyond_the_window, texts_of_low_contrast
from tests.support.sample_reports import case, deviation, location, report

WIDE, NARROW = 1400, 400
CELL = "dp2-tp2-bf16mixed-exceptlast-layerwise-meta-uneven-clip1000.0-norm1-cliploop-bpre2-offloadcpu-acfull"
HEADINGS = {
    "pass": "CONFORMANT",
    "fail": "NOT CONFORMANT",
    "stopped": "NOT CONFORMANT (incomplete: 1 of 6 cases run)",
    "sim": "CONFORMANT",
}
PAGE_OF_PDF = re.compile(rb"/Type\s*/Page\b")


@pytest.mark.parametrize("name", HEADINGS)
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_verdict_subject_and_findings_are_seen_without_scrolling(
    window: Browser, kept_reports: dict[str, Path], name: str, width: int
) -> None:
    window.open(kept_reports[name] / "report.html", width=width)
    assert window.visible("h1") == [HEADINGS[name]]
    assert window.visible("header strong")[0].startswith("torch ")
    told = window.visible(".findings li")
    assert len(told) == window.run("return document.querySelectorAll('.findings li').length") <= 3
    if name == "fail":
        assert told[0].startswith("fail: PAR-1, 3 cases: measured is 2.000 times expected")
        assert "first wrong: " in told[0]
        window.click(".findings a")
        assert window.visible("#cause-1 h3") == ["fail PAR-1"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_every_text_can_be_read(window: Browser, kept_reports: dict[str, Path], width: int, dark: bool) -> None:
    """Folded and unfolded texts have contrast, none is cut off, and nothing has failed in the console."""
    for directory in kept_reports.values():
        window.open(directory / "report.html", width=width, dark=dark)
        assert texts_of_low_contrast(window) + texts_beyond_the_window(window) == []
        window.run(OPEN)
        assert texts_of_low_contrast(window) + texts_beyond_the_window(window) + window.errors() == []


def test_the_checks_see_faint_texts_wide_texts_and_errors(window: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    texts = "<p style='color: #999'>faint</p><p style='white-space: nowrap'>" + "wide " * 99
    page.write_text(f"<!doctype html><body style='background: #fff'>{texts}</p><script>missing()</script>")
    window.open(page, width=NARROW)
    assert [text.partition(": ")[2] for text in texts_of_low_contrast(window)] == ["faint"]
    assert [text[:9] for text in texts_beyond_the_window(window)] == ["the page ", "wide wide"]
    (error,) = window.errors()
    assert "missing is not defined" in error


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    if "chrome" not in BROWSERS:
        pytest.skip("no Chromium is installed that prints: apt-get install chromium chromium-driver")
    with BROWSERS["chrome"]() as session:
        assert isinstance(session, Chrome)
        yield session


def test_reports_are_printed_on_one_page(chrome: Chrome, kept_reports: dict[str, Path], tmp_path: Path) -> None:
    many = tmp_path / "report.html"
    many.write_text(html_report(report_with_many_causes()))
    for file in (*(directory / "report.html" for directory in kept_reports.values()), many):
        chrome.open(file, width=WIDE)
        assert len(PAGE_OF_PDF.findall(chrome.pdf())) == 1, file


def report_with_many_causes() -> Report:
    """A report of thirty families with long names and reasons; twelve cases fail, each for another cause."""
    failed = [
        msgspec.structs.replace(
            case(f"FAM{number}-1/{CELL}", "fail", loss=deviation(1e-3)), reason=f"cause {number}: {'long ' * 200}"
        )
        for number in range(12)
    ]
    passed = [case(f"FAM{number % 30}-{law}/{CELL}") for law in range(2, 9) for number in range(30)]
    places = [location(each.id, name=f"layers.{number}", cell=CELL) for number, each in enumerate(failed)]
    return report(*failed, *passed, exit_code=1, locations=places, verdicts={"pass": 210, "fail": 12})
