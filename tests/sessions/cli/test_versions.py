"""Laws by version of torch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from expecttest import assert_expected_inline

from conformance.__main__ import main
from conformance.cli.versions import laws_text, sweeps_text
from conformance.judge.measurements import Measurement
from conformance.outcomes import SWEPT_OUTCOMES, swept_metric
from conformance.project import PROJECT
from conformance.report.html import html_versions
from conformance.report.versions import version_table
from tests.support.sample_reports import case, report

OLD = report(case("PAR-10/a"), case("PAR-2/a", "unsupported"), case("PAR-2/b"), torch="2.6.0")
NEW = report(case("PAR-2/a"), case("PAR-2/b", "fail"), case("MP-1/a"), torch="2.15.0")


def test_a_table_of_versions() -> None:
    assert_expected_inline(
        laws_text(version_table([OLD, NEW])),
        """\
Profile `pr`, 3 cases for each version of torch.

| law    | 2.6.0                 | 2.15.0         |
|--------|-----------------------|----------------|
| MP-1   | -                     | 1 pass         |
| PAR-2  | 1 pass, 1 unsupported | 1 pass, 1 fail |
| PAR-10 | 1 pass                | -              |""",
    )
    with pytest.raises(ValueError, match=r"reports are of torch 2.6.0, 2.6.0: give one for each version"):
        version_table([OLD, OLD])
    with pytest.raises(ValueError, match=r"reports are of different profiles: \[\('pr', 3\), \('smoke', 3\)\]"):
        version_table([OLD, msgspec.structs.replace(NEW, profile="smoke")])


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
    table = version_table([old, new])
    assert_expected_inline(
        sweeps_text(table),
        """\
Trials: right, refused, wrong.

| sweep   | 2.6.0   | 2.15.0   |
|---------|---------|----------|
| DT-3/a  | 5, 7, 0 | 10, 0, 2 |""",
    )
    assert "<td>10 right, 0 refused, 2 wrong</td>" in html_versions(table)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, side in (("old", OLD), ("new", NEW)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_bytes(msgspec.json.encode(side))
    assert main(["versions", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert "| PAR-10 | 1 pass" in capsys.readouterr().out
    html = tmp_path / "versions.html"
    assert main(["versions", str(tmp_path / "old"), str(tmp_path / "new"), "--html", str(html)]) == 0
    assert html.read_text() == html_versions(version_table([OLD, NEW]))
    assert main(["versions", str(tmp_path / "none")]) == 4


def test_laws_and_cells_by_version() -> None:
    table = version_table([OLD, NEW])
    assert [column.version for column in table.columns] == ["2.6.0", "2.15.0"]
    rows = {row.law: row for row in table.rows}
    verdicts = [(cell, [case.verdict if case else "" for case in cases]) for cell, cases in rows["PAR-2"].cells]
    assert verdicts == [("a", ["unsupported", "pass"]), ("b", ["pass", "fail"])]
    assert [judged.failed for judged in rows["PAR-2"].by_version] == [[], [NEW.cases[1]]]
    same = version_table([OLD, msgspec.structs.replace(OLD, environment=NEW.environment)])
    assert [row.differs for row in table.rows] == [True, True, True]
    assert [row.differs for row in same.rows] == [False, False]


def test_versions_as_html_say_why_a_law_failed() -> None:
    text = html_versions(version_table([OLD, NEW]))
    assert '<td class="bad" title="b: why fail">' in text
    assert text.count('<tbody class="law" data-differs>') == 3
    assert "http" not in text
    evil = msgspec.structs.replace(NEW, cases=[msgspec.structs.replace(NEW.cases[1], reason="<script>")])
    assert text.count("<script>") == html_versions(version_table([evil])).count("<script>") == 1


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


def test_the_script_removes_environments_where_asked(tmp_path: Path) -> None:
    """Ten of them do not fit on the disk of a hosted runner. The last one prints the table."""
    (tmp_path / "make").write_text("#!/bin/sh\nexit 2\n")
    (tmp_path / "make").chmod(0o755)
    environments = [PROJECT / f".venv-torch-{version}-test" for version in ("1.0", "1.1")]
    for keep, left in (("yes", [True, True]), ("no", [False, True])):
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "KEEP_ENVIRONMENTS": keep}
        for directory in environments:
            directory.mkdir(exist_ok=True)
        try:
            script = [str(PROJECT / "ci" / "run_versions.sh"), "1.0-test", "1.1-test"]
            assert subprocess.run(script, env=environment, capture_output=True, check=False).returncode == 1
            assert [directory.exists() for directory in environments] == left
        finally:
            for directory in environments:
                shutil.rmtree(directory, ignore_errors=True)
