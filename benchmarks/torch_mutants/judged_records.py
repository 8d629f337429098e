"""Plugin of pytest, `-p benchmarks.torch_mutants.judged_records`: the records that each case has judged.

A line for each case that a law has judged goes to `FILE` in the report directory: its node id and names of records.
"""

from pathlib import Path

import msgspec
import pytest

FILE = "judged_records.jsonl"


class JudgedRecords(msgspec.Struct, frozen=True):
    """Case by its node id, with the names of the records that its law has asked for."""

    nodeid: str
    records: list[str]


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin of a session."""
    config.pluginmanager.register(_Writer(Path(config.option.report_dir, FILE)))


class _Writer:
    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the line of a case that was judged, with any verdict."""
        records: list[str] | None = getattr(report, "judged_records", None)
        if records is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("ab") as file:
                file.write(msgspec.json.encode(JudgedRecords(report.nodeid, records)) + b"\n")
