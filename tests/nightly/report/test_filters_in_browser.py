"""Filter, links and sections of the HTML report in headless browsers, at 1400 and at 400 pixels."""

from pathlib import Path

import msgspec
import pytest

from conformance.report.html import html_report
from tests.support.browser import Browser
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


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("html") / "report.html"
    file.write_text(html_report(REPORT))
    return file


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_what_failed_laws_grid_and_plots_are_seen(window: Browser, html: Path, width: int) -> None:
    window.open(html, width=width)
    assert window.visible("h1") == ["NOT CONFORMANT"]
    assert window.visible("h2")[0] == "What failed"
    assert window.visible(".group .reason a") == ["pytorch#166638"]
    assert window.visible(".group code")[-1] == "pytest -n0 PAR-2"
    assert window.run("return document.documentElement.scrollWidth") <= width, "nothing is wider than the window"
    window.scroll_to("#PAR-1")
    assert window.visible("#PAR-1 .room")[0].startswith("20 % of the bound: loss at layers.0")
    window.scroll_to("#memory")
    assert len(window.visible("#memory svg.bar")) == 1
    window.scroll_to(PAR_GRID)
    window.run(f"document.querySelector('{PAR_GRID} .box').scrollTo(10000, 10000)")
    assert f"{DP}-seed9" in window.visible(f"{PAR_GRID} .box tbody th"), "the first column sticks"
    assert {"cell", "PAR-14"} <= set(window.visible(f"{PAR_GRID} .box thead th")), "the header sticks"


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
    window.scroll_to(PAR_GRID)
    assert window.visible(f"{PAR_GRID} th") == ["cell", "PAR-2", BF16], "rows and columns without a verdict are hidden"
    window.scroll_to("#filter")
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
    window.open(html, width=WIDE)
    window.scroll_to(".map")
    window.click(".map a[title^='precision and tp']")
    assert window.run("return document.getElementById('shown').value") == "1 of 55 cases"


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_a_link_to_a_case_opens_its_law_and_keeps_the_filter(window: Browser, html: Path, width: int) -> None:
    window.open(html, width=width, hash_="#verdict=fail")
    window.click(".group a[data-case]")
    row = f"tr[id='PAR-2/{BF16}']"
    assert window.visible(f"{row} .fail") == ["fail"]
    assert window.run("return document.getElementById('shown').value") == "1 of 55 cases"
    assert window.run("return location.hash") == f"#verdict=fail&at=PAR-2%2F{BF16}"
    window.open(html, width=width, hash_=f"#PAR-2/{BF16}")
    assert window.visible(f"{row} .fail") == ["fail"]
