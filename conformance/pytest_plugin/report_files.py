"""Files of a session in its report directory, where an earlier report stays until a case of the new one has ended."""

import shutil
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
from filelock import FileLock, Timeout

from conformance.report.schema import CaseResult, Report
from reference_trainer.checks import UsageError

JUNIT = "junit.xml"
PLAN = "plan.json"
_STREAM = "report.jsonl"
_REPORT = ("report.json", _STREAM, "report.html", "summary.md")
_EARLIER_JUNIT = "junit.xml.earlier"


class ReportFiles:
    """Report directory of one session, which no other session can take at the same time.

    Lines go to `report.jsonl.part` until the first case has ended. Then the earlier report and its records are removed,
    and the stream gets its name. A session in which no case ends leaves the earlier report as it was.
    """

    def __init__(self, directory: Path, *, records: Path) -> None:
        """Take a directory; `records` is the directory of the session's records, inside of it or elsewhere.

        Raises UsageError if another session has the directory, or if nothing can be written there.
        """
        self.unwritable = ""
        """Sentence about a write that failed; empty as long as all writes succeed."""
        self._directory, self._records = directory, records
        self._has_begun = False
        self._lock = FileLock(directory / "session.lock", timeout=0)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            self._stream: IO[bytes] = self._unfinished(_STREAM).open("wb")
            self._earlier_records = self._present_records()
            self.has_earlier = any((directory / name).exists() for name in _REPORT)
            """True if the directory has the report of an earlier session, which no ended case has replaced yet."""
            if self.has_earlier and (directory / JUNIT).exists():  # pytest overwrites it, whatever has ended
                shutil.copyfile(directory / JUNIT, directory / _EARLIER_JUNIT)
        except Timeout:
            raise UsageError(f"--report-dir {directory}: another session writes there; name another one") from None
        except OSError as error:
            self._lock.release()
            advice = "name a directory that you may write"
            raise UsageError(f"--report-dir {directory} cannot be written: {error.strerror}: {advice}") from None

    def write_line(self, row: object) -> None:
        """Write a line of the stream; a full disk must not hide the verdicts, which are printed at the end."""
        with self.noting():
            self._stream.write(msgspec.json.encode(row) + b"\n")
            self._stream.flush()

    def replace_earlier(self) -> None:
        """Remove an earlier report with its records; called again and again, since any case may be the first to end."""
        if self._has_begun:
            return
        self._has_begun, self.has_earlier = True, False
        with self.noting():
            for name in (*_REPORT, _EARLIER_JUNIT):
                (self._directory / name).unlink(missing_ok=True)
            for record in self._earlier_records:
                shutil.rmtree(record, ignore_errors=True)
            self._unfinished(_STREAM).rename(self._directory / _STREAM)

    def publish(self, contents: dict[str, bytes]) -> None:
        """Write the files of the report, each under its name when it is complete."""
        self.replace_earlier()
        with self.noting():
            for name, content in contents.items():
                self._unfinished(name).write_bytes(content)
                self._unfinished(name).rename(self._directory / name)

    def keep_earlier(self) -> None:
        """Leave the report of the earlier session as it was."""
        with self.noting():
            self._unfinished(_STREAM).unlink(missing_ok=True)
            for record in self._present_records() - self._earlier_records:
                shutil.rmtree(record, ignore_errors=True)
            if (self._directory / _EARLIER_JUNIT).exists():
                (self._directory / _EARLIER_JUNIT).rename(self._directory / JUNIT)

    def close(self) -> None:
        """End the stream, and give the directory back to other sessions."""
        with self.noting():
            (self._directory / PLAN).unlink(missing_ok=True)
            self._stream.close()
        self._lock.release()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Take an OSError of a write for `unwritable`."""
        try:
            yield
        except OSError as error:
            self.unwritable = f"the report cannot be written to {self._directory}: {error.strerror}"

    def _present_records(self) -> set[Path]:
        return set(self._records.iterdir()) if self._records.is_dir() else set()

    def _unfinished(self, name: str) -> Path:
        return self._directory / f"{name}.part"


def case_properties(result: CaseResult, *, torch_version: str) -> list[tuple[str, object]]:
    """Return the properties of a case in the JUnit file, as pytest's `user_properties`."""
    names = ("law", "cell", "verdict", "substrate")
    return [*((name, getattr(result, name)) for name in names), ("torch", torch_version)]


def name_suite(file: Path, report: Report) -> None:
    """Give the suite in pytest's JUnit file its name, and properties that describe the session.

    pytest's own `junit_suite_name` is an ini option, which the configuration of the user's project would have to set.
    Raises OSError if the file cannot be read or written.
    """
    about = {
        "torch": str(report.environment["packages"]["torch"]),
        "profile": report.profile,
        "selection": report.selection,
        "defect": report.defect or "",
        "exit_code": str(report.exit_code),
    }
    tree = ET.parse(file)
    for suite in tree.iter("testsuite"):
        suite.set("name", "conformance")
        properties = ET.Element("properties")
        for name, value in about.items():
            if value:
                ET.SubElement(properties, "property", name=name, value=value)
        suite.insert(0, properties)
    tree.write(file, encoding="utf-8", xml_declaration=True)
