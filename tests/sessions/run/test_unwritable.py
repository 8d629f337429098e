"""Disks that are full or read-only: one clear error, never a verdict against the product."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.run.case_runs import to_failure
from conformance.run.failures import RunFailed
from conformance.run.ranks.messages import RankReport
from tests.support.sessions import TWO_CASES, Ended, finish, suite


def mounted(directory: Path, options: str) -> Iterator[Path]:
    """Mount a small file system in memory."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "conformance", str(directory)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a file system here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "small", "size=64k")


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "read_only", "ro")


def session(report: Path, output: Path, *options: str) -> Ended:
    return finish(suite(report, "conformance/", *TWO_CASES, *options), output / "session")


@pytest.mark.parametrize("records_only", [False, True])
def test_a_full_disk_is_the_suites_error(small: Path, tmp_path: Path, records_only: bool) -> None:
    report = tmp_path / "report" if records_only else small / "report"
    ended = session(report, tmp_path, *(["--record-dir", str(small / "records")] if records_only else []))
    assert ended.status == 3, ended.output
    assert "No space left on device" in ended.output
    assert "INTERNALERROR" not in ended.output
    assert "\nfail: " not in ended.output


def test_a_read_only_report_directory_is_a_usage_error(read_only: Path, tmp_path: Path) -> None:
    ended = session(read_only / "report", tmp_path)
    assert ended.status == 4
    lines = [line for line in ended.output.splitlines() if line.startswith("ERROR: ")]
    assert len(lines) == 1
    assert "Read-only file system" in lines[0]


def test_an_unwritable_store_is_one_error(read_only: Path, tmp_path: Path) -> None:
    ended = session(tmp_path / "report", tmp_path, "--record-dir", str(read_only / "records"))
    assert ended.status == 3
    assert ended.output.count(f"no record can be written to {read_only / 'records'}: Read-only file system") >= 1
    assert "INTERNALERROR" not in ended.output


@pytest.mark.parametrize(
    ("message", "kind"),
    [("[Errno 28] No space left on device", "suite-error"), ("No such file or directory", "raised")],
)
def test_to_failure_of_a_full_disk_is_the_suites_error(message: str, kind: str) -> None:
    rank = RankReport(rank=0, state="raised", exception_type="OSError", message=message, innermost_file="/torch/x.py")
    assert to_failure(RunFailed(kind="raised", first_rank=0, reason="", ranks=(rank,))).kind == kind
