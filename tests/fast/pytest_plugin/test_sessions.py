"""Parts of a session: files, progress, interrupts, commands that repeat a case, and its end."""

import gc
import io
import shlex
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from conformance.plan.lock import STARTUP_S
from conformance.project import LAWS_DIRECTORY, PROJECT
from conformance.pytest_plugin import controller
from conformance.pytest_plugin.controller import Controller
from conformance.pytest_plugin.interruption import BriefInterrupt
from conformance.pytest_plugin.progress import Progress
from conformance.pytest_plugin.repeating import repeat_command
from conformance.pytest_plugin.report_files import ReportFiles
from conformance.pytest_plugin.session import leave_garbage_to_the_end
from tests.support.sample_reports import case, report

EARLIER = ("report.json", "report.jsonl", "report.html", "summary.md", "junit.xml")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with the report of an earlier session, and one record."""
    for name in EARLIER:
        (tmp_path / name).write_text("earlier")
    (tmp_path / "records" / "dp2--1").mkdir(parents=True)
    return tmp_path


def taken(directory: Path) -> ReportFiles:
    return ReportFiles(directory, records=directory / "records")


def contents(directory: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in directory.iterdir() if file.is_file() and file.stat().st_size}


def records(directory: Path) -> set[str]:
    return {record.name for record in (directory / "records").iterdir()}


def test_an_earlier_report_stays_if_no_case_has_ended(directory: Path) -> None:
    before = contents(directory)
    files = taken(directory)
    files.write_line("header")
    (directory / "records" / "dp2--2").mkdir()
    (directory / "junit.xml").write_text("pytest writes it, whatever has ended")
    assert files.has_earlier
    files.keep_earlier()
    files.close()
    assert contents(directory) == before
    assert records(directory) == {"dp2--1"}
    assert not files.unwritable


def test_an_earlier_report_is_replaced_when_a_case_has_ended(directory: Path) -> None:
    files = taken(directory)
    files.write_line("header")
    (directory / "records" / "dp2--2").mkdir()
    assert contents(directory).items() >= {"report.json": "earlier", "report.jsonl": "earlier"}.items()
    for _ in range(2):
        files.replace_earlier()
    files.write_line("case")
    assert not files.has_earlier
    assert contents(directory) == {"report.jsonl": '"header"\n"case"\n', "junit.xml": "earlier"}
    assert records(directory) == {"dp2--2"}
    files.publish({"report.json": b"new", "summary.md": b"new"})
    files.close()
    assert contents(directory).items() >= {"report.json": "new", "summary.md": "new"}.items()
    assert not list(directory.glob("*.part"))


def test_a_session_without_cases_reports_into_an_empty_directory(tmp_path: Path) -> None:
    files = taken(tmp_path / "new")
    files.write_line("header")
    assert not files.has_earlier
    files.publish({"report.json": b"new"})
    files.close()
    assert contents(tmp_path / "new") == {"report.json": "new", "report.jsonl": '"header"\n'}


def test_files_of_a_killed_session_do_no_harm(directory: Path) -> None:
    (directory / "report.jsonl.part").write_text("killed")
    (directory / "junit.xml.earlier").write_text("killed")
    files = taken(directory)
    files.replace_earlier()
    files.close()
    assert contents(directory) == {"junit.xml": "earlier"}


def test_a_directory_has_one_session_at_a_time(directory: Path) -> None:
    first = taken(directory)
    with pytest.raises(ValueError, match=r"--report-dir \S+: another session writes there; name another one"):
        taken(directory)
    first.close()
    taken(directory).close()


def test_a_failed_write_is_noted(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = taken(directory)

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    files.publish({"report.json": b"new"})
    files.close()
    assert files.unwritable == f"the report cannot be written to {directory}: No space left on device"


def test_a_directory_that_cannot_be_made_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--report-dir \S+ cannot be written"):
        taken(tmp_path / "file")


# Progress


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
)
def test_estimates(durations_s: dict[str, float], cells_s: dict[str, float], text: str) -> None:
    """An estimate is the time of earlier sessions, or that of the lock file."""
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


# Interrupts


def interrupted(*, has_line: bool) -> pytest.ExceptionInfo[BaseException]:
    """Return an interrupt one call further down, at a place whose line the interpreter knows or does not know."""
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    if sys.gettrace():
        pytest.skip("traced code, such as under coverage, has a table of lines in which nothing is without one")
    error, tb = caught.value, caught.tb
    chain = None if has_line else types.TracebackType(None, tb.tb_frame, 10**6, -1)
    assert chain is None or chain.tb_lineno is None
    for _ in range(2):
        chain = types.TracebackType(chain, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    return pytest.ExceptionInfo.from_exception(error.with_traceback(chain))


@pytest.mark.parametrize(("full", "has_line", "entries"), [(False, True, 1), (False, False, 1), (True, False, 2)])
def test_an_interrupt_is_shown_without_entries_that_have_no_line(full: bool, has_line: bool, entries: int) -> None:
    """The filter can be removed once pytest renders such an entry; a brief trace keeps the last one alone."""
    excinfo = interrupted(has_line=has_line)
    if not has_line:
        with pytest.raises(TypeError):
            excinfo.getrepr(funcargs=True)
    BriefInterrupt(full=full).pytest_keyboard_interrupt(excinfo)
    assert [entry.name for entry in excinfo.traceback] == ["interrupted"] * entries
    assert "1 / 0" in str(excinfo.getrepr(funcargs=True))


# Commands that repeat a case


NAME = "test_replicas_are_equal[dp2-fp32]"
PARITY = LAWS_DIRECTORY / "numerics" / "test_par.py"


@pytest.mark.parametrize(
    ("path", "directory", "test"),
    [
        (PARITY, PROJECT, [f"conformance/laws/numerics/test_par.py::{NAME}"]),
        (PARITY, LAWS_DIRECTORY, [f"numerics/test_par.py::{NAME}"]),
        (PARITY, Path("/elsewhere"), ["--pyargs", f"conformance.laws.numerics.test_par::{NAME}"]),
        (Path("/own/test_more.py"), Path("/elsewhere"), [f"/own/test_more.py::{NAME}"]),
    ],
    ids=["checkout", "below", "wheel", "other laws"],
)
def test_the_test_is_where_pytest_is_asked_for_it(path: Path, directory: Path, test: list[str]) -> None:
    words = shlex.split(repeat_command(path, NAME, ["--profile=pr"], directory=directory))
    assert words[words.index("-n0") :] == ["-n0", "--profile=pr", "--report-dir=conformance-report-repro", *test]


# Search for smallest failing cells


FAILED = report(case("PAR-1/dp2-fp32-default-meta-acc2-sgd", "fail"))


def test_a_bug_of_the_search_is_in_the_report_with_its_traceback() -> None:
    ended = Controller.__new__(Controller)
    ended._setup, ended._search_failure = SimpleNamespace(shrink_s=1.0), ""  # type: ignore[assignment]
    config: Any = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=lambda _name: None))

    def broken(*_arguments: object) -> list[object]:
        raise KeyError("a bug")

    with (
        patch.object(controller, "has_combined", return_value=True),
        patch.object(controller, "smallest_cells", broken),
    ):
        shown = ended._with_smallest(FAILED, config)
    assert (shown.cases, shown.smallest) == (FAILED.cases, [])
    assert "in broken\n" in shown.search_failure
    assert shown.search_failure.endswith("KeyError: 'a bug'\n")
    assert ended._search_failure == (
        "no smallest failing cells: the search ended with KeyError: 'a bug'; report.json has the traceback"
    )


# Garbage at the end


@pytest.mark.parametrize("has_triton", [False, True])
def test_nothing_is_frozen_where_triton_would_report_leaks(monkeypatch: pytest.MonkeyPatch, has_triton: bool) -> None:
    if has_triton:
        monkeypatch.setitem(sys.modules, "triton", sys)
    else:
        monkeypatch.delitem(sys.modules, "triton", raising=False)
    gc.freeze()
    leave_garbage_to_the_end()
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    assert (frozen > 0) != has_triton
