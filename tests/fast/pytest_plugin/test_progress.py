"""Progress: the estimate, and the line on failures and on the case that runs longest."""

import io
import time
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.plan.lock import STARTUP_S
from conformance.pytest_plugin.progress import Progress

PLANNED = {f"test_par.py::test[{name}]": f"PAR-{name}/dp2" for name in "1234"}
FIRST, SECOND, THIRD, FOURTH = PLANNED


def ended(nodeid: str, verdict: str = "pass") -> Any:
    return SimpleNamespace(nodeid=nodeid, when="teardown", conformance={"verdict": verdict})


@pytest.mark.parametrize(
    ("durations_s", "cells_s", "text"),
    [
        ({}, {"dp4": 1.0}, "no earlier session tells how long"),
        ({"PAR-1/dp2": 10.0, "PAR-2/dp2": 20.0}, {}, "no earlier session tells how long"),
        (dict.fromkeys(PLANNED.values(), 10.0), {"dp2": 5.0}, f"about {20 + STARTUP_S:.0f} s, as before"),
        (dict.fromkeys(PLANNED.values(), 120.0), {}, "about 4 min, as before"),
        ({}, {"dp2": 5.0}, f"about {5 + STARTUP_S:.0f} s on two processors (matrix.lock)"),
    ],
    ids=["none", "half", "seconds", "minutes", "lock file"],
)
def test_the_estimate_is_what_earlier_sessions_took_or_the_lock_file_says(
    durations_s: dict[str, float], cells_s: dict[str, float], text: str
) -> None:
    out = io.StringIO()
    progress = Progress(out, workers=2)
    progress.begin(PLANNED, durations_s, cells_s)
    progress.pytest_unconfigure()
    assert out.getvalue() == f"4 cases on 1 cell: {text}\n"


def test_a_line_names_failures_and_the_case_that_runs_longest() -> None:
    progress = Progress(io.StringIO(), workers=2)
    progress.begin(PLANNED, {}, {})
    progress.pytest_unconfigure()
    assert progress.line(0.0) == "0 of 4 cases ended, 0 failed"
    for nodeid in (FIRST, SECOND, THIRD):
        progress.pytest_runtest_logstart(nodeid)
    progress.pytest_runtest_logreport(ended(FIRST))
    progress.pytest_runtest_logreport(ended(FOURTH, "unsupported"))
    line = progress.line(time.monotonic() + 40)
    assert line == "2 of 4 cases ended, 0 failed; running longest: PAR-2/dp2, 40 s"
    progress.pytest_runtest_logreport(ended(SECOND, "fail"))
    crashed: Any = SimpleNamespace(nodeid=THIRD, when="???")
    progress.pytest_runtest_logreport(crashed)
    assert progress.line(0.0) == "4 of 4 cases ended, 2 failed (PAR-2, PAR-3)"


def test_lines_come_while_nothing_happens() -> None:
    out = io.StringIO()
    progress = Progress(out, workers=1, interval_s=0.01)
    progress.begin(PLANNED, {}, {})
    until_s = time.monotonic() + 10
    while out.getvalue().count("\n0 of 4 cases ended") < 2:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    progress.pytest_unconfigure()
    out.close()  # nobody reads any more
