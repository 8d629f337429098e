"""Parts of a session: files, interrupts, commands that repeat a case, and its end."""

import gc
import shlex
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from conformance.outcomes import CellFailed, Failure
from conformance.project import LAWS_DIRECTORY, PROJECT
from conformance.pytest_plugin import controller
from conformance.pytest_plugin.cases import repeat_command
from conformance.pytest_plugin.controller import Controller
from conformance.pytest_plugin.locating import Located
from conformance.pytest_plugin.report_files import ReportFiles
from conformance.pytest_plugin.session import leave_garbage_to_the_end
from conformance.pytest_plugin.terminal import BriefInterrupt
from conformance.report.schema import Report
from tests.support.sample_reports import case, location, report

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
    ended._setup, ended._search_failures = SimpleNamespace(shrink_s=1.0), []  # type: ignore[assignment]
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
    assert ended._search_failures == [
        "no smallest failing cells: the search ended with KeyError: 'a bug'; report.json has the traceback"
    ]


# Search for first wrong places


UNLOCATED = report(case("PAR-1/tp2-fp32-default-meta", "fail"))


def with_locations(explain_s: float, search: Callable[..., Located]) -> tuple[Report, list[str]]:
    """Return the report of a session that failed, and the lines about the search in its terminal."""
    ended = Controller.__new__(Controller)
    ended._setup, ended._search_failures = SimpleNamespace(explain_s=explain_s, trainer=None), []  # type: ignore[assignment]
    config: Any = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=lambda _name: None))
    with patch.object(controller, "locations", search):
        return ended._with_locations(UNLOCATED, config), ended._search_failures


def unfinished() -> CellFailed:
    return CellFailed(Failure(kind="timeout", first_rank=0, reason="no result", details="stacks"))


def test_an_error_of_the_search_for_first_wrong_places_changes_no_verdict() -> None:
    """Places that were found before are kept; a failure of the search itself is told in the same way."""
    found = [location(UNLOCATED.cases[0].id)]
    shown, said = with_locations(30.0, lambda *_: Located(found, unfinished()))
    assert (shown.cases, shown.exit_code, shown.locations) == (UNLOCATED.cases, UNLOCATED.exit_code, found)
    assert shown.location_failure.endswith("CellFailed: no result\nstacks\n")
    told = "conformance.outcomes.CellFailed: no result; report.json has the traceback"
    assert said == [f"not all first wrong places: {told}"]

    def broken(*_arguments: object) -> Located:
        raise KeyError("a bug")

    shown, said = with_locations(30.0, broken)
    assert "in broken\n" in shown.location_failure
    assert said == ["not all first wrong places: KeyError: 'a bug'; report.json has the traceback"]


def test_without_time_no_first_wrong_place_is_searched_for() -> None:
    found = [location(UNLOCATED.cases[0].id)]
    assert with_locations(0.0, lambda *_: Located(found, None)) == (UNLOCATED, [])
    shown, said = with_locations(1.0, lambda *_: Located(found, None))
    assert (shown.locations, shown.location_failure, said) == (found, "", [])


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
