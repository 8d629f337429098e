"""report.html in a headless browser, where one is installed: its script runs, and it fits on a phone."""

import shutil
import subprocess
from pathlib import Path

import pytest

from conformance.report.html import report_page
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
    page = directory / "report.html"
    page.write_text(report_page(REPORT).replace("</body>", PROBE % script + "</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={directory}/profile", "--dump-dom"]
    command = [str(BROWSER), *options, f"--window-size={width},800", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_fits(tmp_path: Path, width: int) -> None:
    found = shown(tmp_path, width=width)
    assert 'data-probe="fits' in found
    assert ">4 of 4 cases</output>" in found


def test_a_filter_hides_cases(tmp_path: Path) -> None:
    found = shown(tmp_path, width=1280, script=HIDE_PASSED)
    assert ">2 of 4 cases</output>" in found
