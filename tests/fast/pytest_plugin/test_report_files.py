"""Files in a report directory: an earlier report is replaced when a case has ended, and not before."""

from pathlib import Path

import pytest

from conformance.pytest_plugin.report_files import ReportFiles

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


def add_record(directory: Path) -> None:
    (directory / "records" / "dp2--2").mkdir()


def test_an_earlier_report_stays_if_no_case_has_ended(directory: Path) -> None:
    before = contents(directory)
    files = taken(directory)
    files.write_line("header")
    add_record(directory)
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
    add_record(directory)
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


def test_a_session_without_cases_reports_where_nothing_was(tmp_path: Path) -> None:
    files = taken(tmp_path / "new")
    files.write_line("header")
    assert not files.has_earlier
    files.publish({"report.json": b"new"})
    files.close()
    assert contents(tmp_path / "new") == {"report.json": "new", "report.jsonl": '"header"\n'}


def test_what_a_killed_session_left_does_no_harm(directory: Path) -> None:
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
