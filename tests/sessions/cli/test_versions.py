"""Laws by version of torch."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from expecttest import assert_expected_inline

from conformance.__main__ import main
from conformance.cli.versions import by_version, laws_text, sweeps_text
from conformance.judge.measurements import Measurement
from conformance.outcomes import SWEPT_OUTCOMES, swept_metric
from conformance.project import PROJECT
from tests.support.sample_reports import case, report

OLD = report(case("PAR-10/a"), case("PAR-2/a", "unsupported"), case("PAR-2/b"), torch="2.6.0")
NEW = report(case("PAR-2/a"), case("PAR-2/b", "fail"), case("MP-1/a"), torch="2.15.0")


def test_a_table_of_versions() -> None:
    assert_expected_inline(
        laws_text(by_version([OLD, NEW])),
        """\
Profile `pr`, 3 cases for each version of torch.

| law    | 2.6.0                 | 2.15.0         |
|--------|-----------------------|----------------|
| MP-1   | -                     | 1 pass         |
| PAR-2  | 1 pass, 1 unsupported | 1 pass, 1 fail |
| PAR-10 | 1 pass                | -              |""",
    )
    with pytest.raises(ValueError, match=r"reports are of torch 2.6.0, 2.6.0: give one for each version"):
        by_version([OLD, OLD])
    with pytest.raises(ValueError, match=r"reports are of different profiles: \[\('pr', 3\), \('smoke', 3\)\]"):
        by_version([OLD, msgspec.structs.replace(NEW, profile="smoke")])


def swept(**trials: int) -> dict[str, Measurement]:
    return {
        swept_metric(outcome): Measurement(kind="exact", value=trials[outcome], lower=None, upper=None, unit="layouts")
        for outcome in SWEPT_OUTCOMES
    }


def test_outcomes_in_sweeps() -> None:
    old = report(
        case("DT-3/a", "pass", **swept(right=5, refused=7, wrong=0)), case("TP-1/a", "unsupported"), torch="2.6.0"
    )
    new = report(case("DT-3/a", "pass", **swept(right=10, refused=0, wrong=2)), case("PAR-2/a"), torch="2.15.0")
    assert_expected_inline(
        sweeps_text(by_version([old, new])),
        """\
Trials: right, refused, wrong.

| sweep   | 2.6.0   | 2.15.0   |
|---------|---------|----------|
| DT-3/a  | 5, 7, 0 | 10, 0, 2 |""",
    )
    assert sweeps_text(by_version([OLD, NEW])) == ""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, side in (("old", OLD), ("new", NEW)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_bytes(msgspec.json.encode(side))
    assert main(["versions", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert "| PAR-10 | 1 pass" in capsys.readouterr().out
    assert main(["versions", str(tmp_path / "none")]) == 4


def test_the_script_goes_on_after_a_version_that_fails(tmp_path: Path) -> None:
    """The table has the one version for which `make` leaves a report."""
    (tmp_path / "make").write_text(
        "#!/bin/sh\n"
        'case "$*" in *TORCH=1.0*) exit 2 ;; esac\n'
        f"mkdir -p versions/2.15.0-test && cp {tmp_path}/report.json versions/2.15.0-test\n"
    )
    (tmp_path / "make").chmod(0o755)
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(NEW))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    script = [str(PROJECT / "ci" / "run_versions.sh")]
    run = {"env": environment, "capture_output": True, "text": True, "check": False}
    try:
        done = subprocess.run([*script, "1.0-test", "2.15.0-test"], **run)  # type: ignore[call-overload]
        assert done.returncode == 1
        assert "torch 1.0-test has left no report" in done.stderr
        assert "| PAR-2 | 1 pass, 1 fail |" in done.stdout, done.stderr
    finally:
        for file in ("versions/2.15.0-test/report.json", "versions/table.md"):
            (PROJECT / file).unlink(missing_ok=True)
    assert subprocess.run(script, **run).returncode == 4  # type: ignore[call-overload]
