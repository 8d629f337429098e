"""A full disk is one clear error, never a verdict against the product."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.run.case_runs import to_failure
from conformance.run.failures import RunFailed
from conformance.run.ranks.messages import RankReport
from tests.support.sessions import TWO_CASES, finish, suite


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Mount a small file system in memory."""
    directory = tmp_path / "small"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "conformance", str(directory)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a file system here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.parametrize("records_only", [False, True])
def test_a_full_disk_is_the_suites_error(small: Path, tmp_path: Path, records_only: bool) -> None:
    report = tmp_path / "report" if records_only else small / "report"
    options = ["--record-dir", str(small / "records")] if records_only else []
    ended = finish(suite(report, "conformance/", *TWO_CASES, *options), tmp_path / "session")
    assert ended.status == 3, ended.output
    assert "No space left on device" in ended.output
    assert "INTERNALERROR" not in ended.output
    assert "\nfail: " not in ended.output


@pytest.mark.parametrize(
    ("message", "kind"),
    [("[Errno 28] No space left on device", "suite-error"), ("No such file or directory", "raised")],
)
def test_to_failure_of_a_full_disk_is_the_suites_error(message: str, kind: str) -> None:
    rank = RankReport(rank=0, state="raised", exception_type="OSError", message=message, innermost_file="/torch/x.py")
    assert to_failure(RunFailed(kind="raised", first_rank=0, reason="", ranks=(rank,))).kind == kind
