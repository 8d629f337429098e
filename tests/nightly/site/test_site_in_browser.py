"""Site of ten versions and two devices, opened from disk in the browsers that are installed.

The versions are made up: reports of small real sessions are copied under other versions of torch, as releases that
fail from 2.10 to 2.12.
"""

import time
from pathlib import Path

import msgspec
import pytest

from conformance.__main__ import main
from conformance.project import PROJECT
from conformance.report.schema import Report, read_report
from tests.support.browser import Browser
from tests.support.page_checks import OPEN, texts_beyond_the_window, texts_of_low_contrast

WIDE, NARROW = 1400, 400
MINORS = range(6, 16)
FAILING = range(10, 13)
LINES = "[...document.querySelector('#trends svg').querySelectorAll('polyline')].map(e => e.getAttribute('points'))"
MAX_S, MAX_BYTES = 60.0, 5e6


def made_up(report: Report, minor: int) -> Report:
    """Return a report under another version of torch, and of the whole profile."""
    packages = report.environment["packages"] | {"torch": f"2.{minor}.0"}
    return msgspec.structs.replace(report, environment=report.environment | {"packages": packages}, defect=None)


@pytest.fixture(scope="module")
def site(kept_reports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, directories = tmp_path_factory.mktemp("site"), []
    kept = {name: read_report(directory) for name, directory in kept_reports.items()}
    for minor in MINORS:
        for name in ("fail" if minor in FAILING else "pass", "sim"):
            directories.append(place / f"{minor}-{name}")
            directories[-1].mkdir()
            (directories[-1] / "report.json").write_bytes(msgspec.json.encode(made_up(kept[name], minor)))
    start = time.perf_counter()
    matrix = PROJECT / "docs" / "kill_matrix.md"
    assert main(["site", str(place / "site"), *map(str, directories), "--kill-matrix", str(matrix)]) == 0
    assert time.perf_counter() - start < MAX_S
    assert sum(file.stat().st_size for file in (place / "site").iterdir()) < MAX_BYTES
    return place / "site" / "index.html"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_every_text_can_be_read(window: Browser, site: Path, width: int, dark: bool) -> None:
    window.open(site, width=width, dark=dark)
    assert window.visible("h1") == ["FSDP2 + TP conformance: 20 reports"]
    assert "17 of 20 are conformant" in window.visible("header p")[0]
    window.run(OPEN)
    assert texts_of_low_contrast(window) + texts_beyond_the_window(window) + window.errors() == []


def test_cells_lead_to_cases_and_findings(window: Browser, site: Path) -> None:
    window.open(site, width=WIDE)
    window.click("#laws td.fail a")
    assert window.visible("#chosen h2")[0].startswith("PAR-1 on 2.10.0, CPU (gloo")
    window.click("#chosen th a")
    verdicts: list[str] = window.run(
        "return [...document.querySelectorAll('#chosen td:nth-child(2)')].map(e => e.textContent)"
    )
    assert len(verdicts) == 2 * len(MINORS)
    assert verdicts.count("fail") == len(FAILING)
    assert texts_beyond_the_window(window) == []
    window.run("history.back()")
    assert window.visible("#chosen h2")[0].startswith("PAR-1 on 2.10.0")
    window.click("#chosen > a")
    assert window.visible("#chosen h2") == []
    window.click("#findings td.fail a")
    assert "measured is 2.000 times expected" in window.visible("#chosen h2")[0]
    assert window.errors() == []


def test_any_two_columns_are_compared_in_both_directions(window: Browser, site: Path) -> None:
    gloo_9, gloo_10 = 2 * MINORS.index(9), 2 * MINORS.index(10)

    def told(before: int, after: int) -> str:
        window.open(site, width=NARROW, hash_=f"#{before}..{after}")
        return str(window.run("return document.querySelector('#difference').textContent"))

    assert told(gloo_9, gloo_10).startswith("3 new-fail.")
    assert told(gloo_10, gloo_9).startswith("3 fixed.")
    assert told(gloo_9, gloo_9) == "Choose two different columns."
    window.run(
        "const { after } = window; after.value = arguments[0]; after.dispatchEvent(new Event('change'))", gloo_10
    )
    assert window.run("return location.hash") == f"#{gloo_9}..{gloo_10}"
    assert window.visible("#difference p")[0].startswith("3 new-fail.")
    assert window.errors() == []


def test_trends_have_all_versions_and_a_line_for_each_device(window: Browser, site: Path) -> None:
    window.open(site, width=WIDE)
    lines: list[str] = window.run(f"return {LINES}")
    assert [len(points.split()) for points in lines] == [len(MINORS)] * 2
