"""`python -m conformance verify`: it agrees with an honest report, and with no other."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from conformance.__main__ import main
from conformance.cli.verify import verify
from conformance.project import PROJECT
from tests.support.sample_reports import location
from tests.support.sessions import CELL, TWO_CASES, Ended, finish, suite

MATRIX = PROJECT / "matrix.yaml"
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """One case fails, one passes."""
    directory = tmp_path_factory.mktemp("verified") / "report"
    options = [*TWO_CASES, "--defect", "grads-summed", "--seed", "3"]
    session = finish(suite(directory, "conformance/laws/numerics/test_par.py", *options), directory)
    assert session.report.verdicts == {"pass": 1, "fail": 1}, session.output
    return session


@pytest.fixture
def copy(session: Ended, tmp_path: Path) -> Path:
    return Path(shutil.copytree(session.directory, tmp_path / "copy"))


def test_an_honest_report(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(copy)]) == 0
    assert capsys.readouterr().out == "2 cases judged again from records, 0 problems\n"


def edit(directory: Path, change: Callable[[dict[str, Any], Rows], object]) -> None:
    """Change report.json, and the rows of report.jsonl."""
    report = json.loads((directory / "report.json").read_text())
    rows = [json.loads(line) for line in (directory / "report.jsonl").read_text().splitlines()]
    change(report, rows)
    (directory / "report.json").write_text(json.dumps(report))
    (directory / "report.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def failed(rows: Rows) -> dict[str, Any]:
    return next(row for row in rows if row.get("verdict") == "fail")


def hide_the_failure(report: dict[str, Any], rows: Rows) -> None:
    """Everywhere, so that the sums agree."""
    for case in (failed(report["cases"]), failed(rows)):
        case.update(verdict="pass", reason="")
    for totals in (report, rows[-1]):
        totals.update(verdicts={"pass": 2}, exit_code=0)


def drop_the_failure(report: dict[str, Any], rows: Rows) -> None:
    report["cases"].remove(failed(report["cases"]))
    rows.remove(failed(rows))
    for totals in (report, rows[-1]):
        totals.update(verdicts={"pass": 1}, executed=1, exit_code=0)


def call_it_a_crash(report: dict[str, Any], rows: Rows) -> None:
    for case in (failed(report["cases"]), failed(rows)):
        case.update(verdict="crash", reason="rank 1 was killed by SIGKILL")
    for totals in (report, rows[-1]):
        totals.update(verdicts={"pass": 1, "crash": 1})


def raise_the_coverage(report: dict[str, Any], rows: Rows) -> None:
    report["coverage"]["triples"]["values"]["seen"] += 1


def change_a_metric(report: dict[str, Any], rows: Rows) -> None:
    for case in (failed(report["cases"]), failed(rows)):
        next(iter(case["measured"].values()))["value"] *= 2


def locate_what_passes(report: dict[str, Any], rows: Rows) -> None:
    (passed,) = (case["id"] for case in report["cases"] if case["verdict"] == "pass")
    report["locations"].append(msgspec.to_builtins(location(passed)))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (locate_what_passes, ": has a first wrong place and no failure"),
        (hide_the_failure, "the report says pass, the records give fail: gradient at step 0"),
        (drop_the_failure, "2 cases planned, 1 listed"),
        (call_it_a_crash, "the report says crash because of 'rank 1 was killed by SIGKILL', of which no record tells"),
        (change_a_metric, "the report has the metrics"),
        (raise_the_coverage, "the coverage is not that of the cases"),
        (lambda report, _rows: report.update(exit_code=0), "the report says exit status 0, the verdicts give 1"),
        (lambda report, _rows: report.update(executed=1), "the report counts 1 executed case, its cases say 2"),
        (lambda report, _rows: report.update(verdicts={"pass": 2}), "the report counts the verdicts {'pass': 2}"),
        (lambda report, _rows: report["cases"].append(report["cases"][0]), "a case is listed twice"),
        (lambda report, rows: rows.remove(failed(rows)), "report.jsonl says otherwise than report.json"),
        (lambda report, rows: rows[-1].update(planned=9), "the last line of report.jsonl says otherwise"),
        (lambda report, rows: failed(report["cases"]).update(id="PAR-1/dp9"), "no case of this profile"),
    ],
)
def test_a_report_that_lies(
    copy: Path, change: Callable[[dict[str, Any], Rows], object], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(copy, change)
    assert main(["verify", str(copy)]) == 1
    assert problem in capsys.readouterr().out


def test_other_tensors_in_a_record(copy: Path) -> None:
    (file,) = copy.glob("records/*-sgd-seed3--*/rank1.safetensors")
    tensors = load_file(file)
    key = next(key for key in tensors if key.startswith("step0/gradient/"))
    save_file({**tensors, key: tensors[key] * 2}, file)
    assert verify(copy, matrix_file=MATRIX).problems


def test_a_missing_record(copy: Path) -> None:
    shutil.rmtree(copy / "records")
    facts, *problems = verify(copy, matrix_file=MATRIX).problems
    assert facts == "facts of cells are not those of the records"
    assert len(problems) == 2
    assert all(f"no record {CELL}-seed3--" in problem for problem in problems)


def test_a_record_that_is_cut_off(copy: Path) -> None:
    for file in copy.glob("records/*/record.json"):
        file.write_bytes(file.read_bytes()[:300])
    problem, *_ = verify(copy, matrix_file=MATRIX).problems
    assert "a record is cut off or was written by something else" in problem


def nothing_judged(report: dict[str, Any], rows: Rows) -> None:
    del rows[1:-1]
    report.update(cases=[], cells={})
    for totals in (report, rows[-1]):
        totals.update(verdicts={}, planned=0, executed=0, exit_code=5)


def test_a_report_of_nothing(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(copy, nothing_judged)
    shutil.rmtree(copy / "records")
    assert main(["verify", str(copy)]) == 1
    assert "no case could be judged again: " in capsys.readouterr().out


def test_records_elsewhere(copy: Path) -> None:
    (copy / "records").rename(copy / "elsewhere")
    assert verify(copy, matrix_file=MATRIX, records=copy / "elsewhere").problems == []
    assert main(["verify", str(copy), "--record-dir", str(copy / "records")]) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda report, _rows: report.update(suite_digest="0"), "written by another version of the suite"),
        (lambda report, _rows: report.update(matrix_digest="0"), "judged with another matrix"),
        (lambda report, _rows: report["environment"]["packages"].update(torch="2.9.0"), "written with torch 2.9.0"),
        (lambda report, _rows: report.pop("cases"), "the report is cut off or was written by something else"),
        (lambda _report, rows: rows.pop(), "the report is cut off"),
    ],
)
def test_what_cannot_be_verified(
    copy: Path, change: Callable[[dict[str, Any], Rows], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(copy, change)
    assert main(["verify", str(copy)]) == 4
    assert message in capsys.readouterr().err
