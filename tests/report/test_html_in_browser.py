"""report.html in a headless browser, where one is installed: its script runs, and it fits on a phone."""

import shutil
import subprocess
from pathlib import Path

import pytest

from conformance.report.html import html_report
from tests.report.test_html import REPORT

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
PROBE = """<script>
const wide = document.documentElement.scrollWidth > window.innerWidth;
document.body.dataset.probe = (wide ? "wider than the window" : "fits") + ", " + %s;
</script>"""
HIDE_PASSED = 'document.querySelector("input[value=pass]").click()'

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")


def shown(directory: Path, *, width: int, script: str = '""') -> str:
    """The document after its scripts, and another one, have run."""
    file = directory / "report.html"
    file.write_text(html_report(REPORT).replace("</body>", PROBE % script + "</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={directory}/profile", "--dump-dom"]
    command = [str(BROWSER), *options, f"--window-size={width},800", file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("width", [1280, 500])
def test_the_report_fits(tmp_path: Path, width: int) -> None:
    document = shown(tmp_path, width=width)
    assert 'data-probe="fits' in document
    assert ">4 of 4 cases</output>" in document


def test_a_filter_hides_cases(tmp_path: Path) -> None:
    document = shown(tmp_path, width=1280, script=HIDE_PASSED)
    assert ">2 of 4 cases</output>" in document


def test_a_filter_hides_laws_and_nothing_else_that_is_folded(tmp_path: Path) -> None:
    hidden = 'document.querySelectorAll("details[hidden]").length + " hidden"'
    assert 'data-probe="fits, 0 hidden"' in shown(tmp_path, width=1280, script=hidden)
    assert ", 1 hidden" in shown(tmp_path, width=1280, script=f"({HIDE_PASSED}, {hidden})"), "MEM-1 has passed alone"
