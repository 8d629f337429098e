"""Headless browsers, and reports of small real sessions to look at in them."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.browser import BROWSERS, Browser, BrowserUnavailableError
from tests.support.sessions import SIX_CASES, TWO_CASES, finish, suite

EXPLAIN_S = 60.0


@pytest.fixture(scope="module", params=["chrome", "firefox"])
def window(request: pytest.FixtureRequest) -> Iterator[Browser]:
    """Window of each browser; a test is skipped where the browser is not installed or does not start."""
    start = BROWSERS.get(request.param)
    if start is None:
        pytest.skip(f"no {request.param} is installed: apt-get install chromium chromium-driver firefox-esr")
    with ExitStack() as stack:
        try:
            session = stack.enter_context(start())
        except BrowserUnavailableError as error:
            pytest.skip(f"{request.param} does not start here: {error}")
        yield session


@pytest.fixture(scope="session")
def kept_reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Report directories of sessions that pass, fail, were stopped by a failure, and ran on the simulated device."""
    place, wrong = tmp_path_factory.mktemp("kept"), ("--defect", "grads-summed")
    sessions = {
        "pass": SIX_CASES,
        "fail": (*SIX_CASES, *wrong),
        "stopped": (*SIX_CASES, *wrong, "-x"),
        "sim": (*TWO_CASES, "--accelerator", "sim"),
    }
    for name, arguments in sessions.items():
        ended = finish(suite(place / name, "conformance/", *arguments, explain_s=EXPLAIN_S), place / name)
        assert (place / name / "report.html").exists(), ended.output
    return {name: place / name for name in sessions}
