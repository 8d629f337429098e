"""HTML reports in a headless browser, where one is installed: what a person sees at 1400 and at 400 pixels."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from conformance.report.html import html_report, html_versions
from conformance.report.versions import version_table
from tests.support.browser import BROWSER, DRIVER, Browser, BrowserUnavailableError, browser
from tests.support.sample_reports import FACTS, bytes_of, case, deviation, report

DP, TP, BF16 = "dp2-fp32-default-meta", "dp2-tp2-fp32-default-meta", "dp2-tp2-bf16mp-default-meta-clip0.1"
WIDE, NARROW = 1400, 400
FAILED = msgspec.structs.replace(
    case(f"PAR-2/{BF16}", "fail", loss=deviation(1e-3)), repro="pytest -n0 PAR-2", reason="see pytorch#166638"
)
REPORT = report(
    case(f"PAR-1/{DP}", loss=deviation(1e-6)),
    case(f"PAR-1/{TP}", loss=deviation(2e-6)),
    FAILED,
    *(case(f"PAR-{number}/{DP}") for number in range(3, 14)),
    *(case(f"PAR-14/{DP}-seed{seed}") for seed in range(1, 40)),
    case(f"MEM-1/{TP}", **{"peak of forward": bytes_of(3 << 20, lower=3 << 20, upper=4 << 20)}),  # type: ignore[arg-type]
    case(f"STREAM-2/{DP}", "unsupported"),
    cells={DP: FACTS, TP: FACTS},
    verdicts={"pass": 53, "fail": 1, "unsupported": 1},
    exit_code=1,
)
PAR_GRID = "details.grid:nth-of-type(2)"

pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no Chromium or Chrome with its chromedriver is installed"
)


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with ExitStack() as stack:
        try:
            session = stack.enter_context(browser())
        except BrowserUnavailableError as error:
            pytest.skip(f"no browser starts here: {error}")
        yield session


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("html") / "report.html"
    file.write_text(html_report(REPORT))
    return file


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    passed = [msgspec.structs.replace(result, verdict="pass") for result in REPORT.cases]
    newer = report(*passed, torch="2.15.0", verdicts={"pass": len(passed)})
    file = tmp_path_factory.mktemp("versions") / "versions.html"
    file.write_text(html_versions(version_table([REPORT, newer])))
    return file


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_outcome_and_what_failed_come_first(window: Browser, html: Path, width: int) -> None:
    window.open(html, width=width)
    assert window.visible("h1") == ["NOT CONFORMANT"]
    assert window.visible("h2")[0] == "What failed"
    assert window.visible(".group h3 .fail") == ["fail"]
    assert window.visible(".group .reason a") == ["pytorch#166638"]
    assert window.visible(".group code")[-1] == "pytest -n0 PAR-2"
    assert window.run("return document.documentElement.scrollWidth") == width, "nothing is wider than the window"


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_verdicts_of_laws_and_of_the_grid_are_seen(window: Browser, html: Path, width: int) -> None:
    window.open(html, width=width)
    window.scroll_to("#PAR-1")
    assert window.visible("#PAR-2 .counts") == ["1 fail"]
    assert window.visible("#PAR-1 .room")[0].startswith("20 % of the bound: loss at layers.0")
    window.scroll_to(PAR_GRID)
    assert {"pass", "fail"} <= set(window.visible(f"{PAR_GRID} td a"))


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_header_and_first_column_of_the_grid_stick(window: Browser, html: Path, width: int) -> None:
    window.open(html, width=width)
    window.scroll_to(PAR_GRID)
    box = f"{PAR_GRID} .box"
    window.run(f"document.querySelector('{box}').scrollTo(10000, 10000)")
    assert f"{DP}-seed9" in window.visible(f"{box} tbody th")
    assert "PAR-14" in window.visible(f"{box} thead th")
    assert "cell" in window.visible(f"{box} thead th")
    if width == NARROW:
        assert "PAR-1" not in window.visible(f"{box} thead th"), "the table has scrolled"
        assert window.visible(f"{box} td a") == ["pass"] * len(window.visible(f"{box} td a")) != []


def test_columns_and_rows_without_a_verdict_are_hidden(window: Browser, html: Path) -> None:
    window.open(html, width=WIDE, hash_="#text=bf16mp")
    window.scroll_to(PAR_GRID)
    assert window.visible(f"{PAR_GRID} th") == ["cell", "PAR-2", BF16]
    assert window.run("return [...document.querySelectorAll('details.grid')].filter(grid => !grid.hidden).length") == 1


def test_a_link_reproduces_the_filter(window: Browser, html: Path) -> None:
    window.open(html, width=WIDE)
    window.click("#filter summary")
    window.click("#text")
    window.press("par")
    window.click("input[value=pass]")
    window.run(
        "const axis = document.getElementById('axis'); axis.value = 'tp=2'; axis.dispatchEvent(new Event('change'))"
    )
    assert window.visible("#shown") == ["1 of 55 cases"]
    assert window.visible("#chosen button") == ["tp=2 \N{MULTIPLICATION SIGN}"]
    address = window.run("return location.hash")
    window.open(html, width=NARROW, hash_=address)
    assert window.visible("#shown") == ["1 of 55 cases"]
    assert window.run("return document.getElementById('text').value") == "par"
    assert not window.run("return document.querySelector('input[value=pass]').checked")
    window.click("#chosen button")
    window.click("button[type=reset]")
    assert window.visible("#shown") == ["55 of 55 cases"]
    assert window.run("return location.hash") == ""


def test_axes_of_the_address_are_joined_by_and_their_values_by_or(window: Browser, html: Path) -> None:
    def shown(hash_: str) -> list[str]:
        return window.open(html, width=WIDE, hash_=hash_).visible("#shown")

    assert shown("#axis=tp") == ["3 of 55 cases"]
    assert shown("#axis=tp&axis=precision") == ["1 of 55 cases"]
    assert shown("#axis=tp%3D1&axis=tp%3D2&verdict=pass") == ["53 of 55 cases"]
    assert shown("#verdict=") == ["0 of 55 cases"]
    assert shown("#text=100%") == ["0 of 55 cases"]


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_a_link_to_a_case_opens_its_law_and_keeps_the_filter(window: Browser, html: Path, width: int) -> None:
    window.open(html, width=width, hash_="#verdict=fail")
    window.click(".group a[data-case]")
    row = f"tr[id='PAR-2/{BF16}']"
    assert window.visible(f"{row} .fail") == ["fail"]
    assert window.run("return document.getElementById('shown').value") == "1 of 55 cases"
    assert window.run("return location.hash") == f"#verdict=fail&at=PAR-2%2F{BF16}"
    window.run("scrollTo(0, 0)")
    window.click("nav a[href='#grid']")
    assert window.run("return location.hash") == "#verdict=fail&at=grid"
    assert window.visible("details.grid td a") == ["fail"]
    window.open(html, width=width, hash_=f"#PAR-2/{BF16}")
    assert window.visible(f"{row} .fail") == ["fail"]


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("hash_", ["", "#axis=tp"])
def test_facts_open_and_so_do_collectives_as_text(window: Browser, html: Path, width: int, hash_: str) -> None:
    window.open(html, width=width, hash_=hash_)
    assert window.visible("#facts table") == []
    window.click("#facts > details:nth-of-type(1) > summary")
    as_text = f"[data-facts='{TP}'] .as-text"
    window.click(f"{as_text} > summary")
    window.scroll_to(as_text)
    assert window.visible(as_text) == ["as text4 x forward all_gather dp_shard"]


def test_a_pair_of_axes_opens_to_values_by_keyboard(window: Browser, html: Path) -> None:
    window.open(html, width=NARROW)
    window.scroll_to(".map")
    window.run("document.querySelector(\".map button[title^='precision and tp']\").focus()")
    window.press("\ue007")  # Enter
    assert window.visible(".values td") == ["bf16-mp", "2", "1", "1"]
    window.click(".values:popover-open a")
    assert window.visible(".values td") == []
    assert window.run("return document.getElementById('shown').value") == "1 of 55 cases"


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_plots_have_their_bounds(window: Browser, html: Path, width: int) -> None:
    window.open(html, width=width)
    window.scroll_to("#memory")
    assert len(window.visible("#memory svg.bar")) == 1
    assert window.run("return document.querySelectorAll('#memory svg.bar .bound').length") == 2
    window.scroll_to("#losses")
    assert len(window.visible("#losses circle")) == 3


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_versions_are_columns_and_laws_open_to_cells(window: Browser, versions: Path, width: int) -> None:
    window.open(versions, width=width)
    assert window.visible("thead th") == ["law", "2.13.0", "2.15.0"]
    assert window.visible("tbody:first-of-type td > span:first-child") == ["NOT CONFORMANT", "CONFORMANT"]
    window.click("#differing")
    assert window.run("return document.querySelectorAll('tbody.law:not([hidden])').length") == 2
    assert window.visible("#PAR-2 .fail") == ["1 fail"]
    window.click("#PAR-2 summary")
    assert window.visible("#PAR-2 details a") == ["pytorch#166638"]
    window.click("#PAR-2 button")
    assert window.visible("tr.case td > span") == ["fail", "pass"]
    assert window.run("return document.documentElement.scrollWidth") == width
