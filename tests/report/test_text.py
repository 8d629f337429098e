"""What a session ends with in words, and the line that it shows while it runs."""

import io
import os
import pty
import subprocess
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from expecttest import assert_expected_inline

from conformance.instruments.communication import Communication
from conformance.project import PROJECT
from conformance.pytest_plugin.progress_line import ProgressLine
from conformance.report.schema import Report
from conformance.report.text import markdown, terminal_lines
from tests.report.test_diff import FACTS, case, report
from tests.sessions import ONE_CELL, suite


def found() -> Report:
    wrong = [msgspec.structs.replace(case(f"PAR-1/{mesh}", "fail"), reason="loss is *far* off") for mesh in "ab"]
    errors = [msgspec.structs.replace(case(f"PAR-10/{mesh}", "error"), reason="disk full") for mesh in "abc"]
    others = [case("PAR-2/a"), msgspec.structs.replace(case("STREAM-2/a", "unsupported"), reason="needs 2 devices")]
    verdicts = {"pass": 1, "fail": 2, "error": 3, "unsupported": 1}
    return report(*wrong, *errors, *others, verdicts=verdicts, planned=7, executed=7, exit_code=3, duration_s=1.0)


def test_the_end_of_a_session() -> None:
    text = "\n".join(terminal_lines(found(), Path("here")))
    assert text.count("disk full") == 1
    assert "and 2 cases with the same reason" in text
    assert "unsupported, 1 cases: needs 2 devices" in text
    assert text.index("PAR-2 ") < text.index("PAR-10 "), "laws in their order"
    assert text.endswith("\nprofile pr: 7 of 7 cases executed in 1.0 s, exit status 3; report: here")


def test_communication_that_nothing_hides_is_told_as_a_fact() -> None:
    shares = {"a": 0.01, "b": 0.04, "c": 0.02}
    cells = {
        name: msgspec.structs.replace(
            FACTS, communication=Communication(step_s=0.1, busy_s=exposed_s, exposed_s=exposed_s)
        )
        for name, exposed_s in shares.items()
    }
    text = "\n".join(terminal_lines(report(cells={**cells, "without": FACTS}), Path("here")))
    assert (
        "a step communicates while nothing is computed for 20% of its time in the median of 3 cells, for 40% in b"
    ) in text
    assert "communicates" not in "\n".join(terminal_lines(found(), Path("here")))


def test_nothing_selected_says_what_to_do() -> None:
    first, *_ = terminal_lines(report(planned=0, executed=0), Path("here"))
    assert first.startswith("no case is selected: see python -m conformance list")


def test_markdown() -> None:
    text = markdown(found())
    assert_expected_inline(
        text[text.index("| law") :],
        """\
| law      |   pass |   unsupported |   fail |   error |   seconds |
|----------|--------|---------------|--------|---------|-----------|
| PAR-1    |        |               |      2 |         |         2 |
| PAR-2    |      1 |               |        |         |         1 |
| PAR-10   |        |               |        |       3 |         3 |
| STREAM-2 |        |             1 |        |         |         1 |
""",
    )
    assert text.startswith("## Conformance: profile pr: 7 of 7 cases executed")
    assert text.count("- **fail** `PAR-1/") == 2
    assert r"loss is \*far\* off" in text


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(screen: Any, *, verbosity: int = 0) -> ProgressLine:
    """A line of progress of a session with two cases."""
    reporter = types.SimpleNamespace(isatty=screen.isatty(), write=lambda text, flush: screen.write(text))
    plugins = types.SimpleNamespace(get_plugin=lambda name: reporter)
    config = types.SimpleNamespace(pluginmanager=plugins, get_verbosity=lambda: verbosity)
    line = ProgressLine()
    line.pytest_sessionstart(types.SimpleNamespace(config=config))  # type: ignore[arg-type]
    line.pytest_xdist_node_collection_finished(["a", "b"])
    return line


def test_the_line_counts_cases() -> None:
    screen = Screen()
    line = watched(screen)
    line.pytest_runtest_logstart("a")
    line.pytest_runtest_logstart("b")
    line.pytest_runtest_logfinish("a")
    *_, last = screen.getvalue().splitlines()
    assert "1/2" in last
    assert "1 running, 0 waiting for devices" in last
    assert screen.getvalue().count("\n") == 4, "room for the line, then in its place each time"
    marks = line.pytest_report_teststatus()
    next(marks)
    with pytest.raises(StopIteration) as done:
        marks.send(("passed", ".", "PASSED"))
    assert done.value.value == ("passed", "", "")


def test_no_line_without_a_terminal_or_beside_details() -> None:
    for screen, verbosity in ((io.StringIO(), 0), (Screen(), 1)):
        watched(screen, verbosity=verbosity).pytest_runtest_logstart("a")
        assert screen.getvalue() == ""


def test_in_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = suite(tmp_path / "report", "conformance/", "--cells", ONE_CELL)
    process = subprocess.Popen(command, cwd=PROJECT, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # what Linux says when the other side is closed
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert process.wait() == 0, shown.decode()
    assert b"running, 0 waiting for devices" in shown
    assert b"2/2 cases" in shown
