"""Sessions of the suite in separate processes: reports, failures and interruptions."""

import json
import re
import shlex
import shutil
import signal
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import msgspec
import psutil
import pytest

from conformance.project import PROJECT
from conformance.report.schema import CaseResult, Footer, Header
from conformance.run.experiment import TRAINING
from conformance.run.record import RecordFile
from tests.support.sessions import SIX_CASES, TWO_CASES, Ended, alive, finish, suite

# Two kinds of meshes, laws that compare one cell or two, and the laws on the environment.
HEALTHY = (
    *("--cells", "id in (tp2-fp32-default-meta, dp2-fp32-default-meta-fpre1)"),
    *("--laws", "ENV-*,AXIS-1,INIT-1,MP-1,PAR-1,PAR-4,PAR-5,RS-1"),
)
WAIVED_CELL = "dp2-tp2-fp32-default-meta"
ENDING_LIMIT_S = 30.0
"""Far more than ending takes on a busy machine, and half of the deadline of a cell, for which nothing may wait."""


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    directory = tmp_path_factory.mktemp("healthy") / "report"
    return finish(suite(directory, "conformance/", *HEALTHY), directory)


# A healthy session


def test_report(healthy: Ended) -> None:
    report = healthy.report
    assert healthy.status == report.exit_code == 0, healthy.output
    assert report.planned == report.executed == len(report.cases)
    assert report.planned > 10
    assert report.verdicts == {"pass": report.planned - 1, "unsupported": 1}
    assert (report.schema, report.profile, report.defect) == (1, "pr", None)
    assert {"packages", "device", "backends", "variables", "git", "substrate"} <= report.environment.keys()
    assert report.environment["packages"]["torch"].startswith("2.")
    assert [case.id for case in report.cases] == sorted({case.id for case in report.cases})
    (on_devices,) = (case for case in report.cases if case.law == "ENV-4")
    assert on_devices.reason.startswith("needs 2 GPUs (nccl) or 1 shared GPU (nccl-shared); none found")
    for case in report.cases:
        assert case.id == f"{case.law}/{case.cell}"
        assert case is on_devices or (case.verdict, case.reason, case.substrate) == ("pass", "", "gloo")
        assert case.duration_s >= case.run_s + case.wait_s >= 0
        assert "MUST" in case.must
        assert case.repro.startswith("pytest -n0 --profile=pr ")
    judged = {name: law.judged for name, law in report.coverage.laws.items() if law.judged}
    assert judged == Counter(case.law for case in report.cases if case.verdict == "pass")
    assert report.coverage.pairs.values.seen == report.coverage.laws["PAR-1"].pairs
    assert "\ncoverage by laws on numbers: pairs " in healthy.output
    assert {case.law for case in report.cases} >= {"ENV-1", "PAR-1", "PAR-4", "RS-1", "MP-1", "INIT-1"}


def test_records_tell_how_long_ranks_were_training(healthy: Ended) -> None:
    files = list(healthy.directory.glob("records/*/record.json"))
    records = [msgspec.json.decode(file.read_bytes(), type=RecordFile) for file in files]
    trained = {record.header.experiment: record.train_s / record.run_s for record in records}
    assert trained["conformance.experiments.environment:probe"] == 0
    assert 0.2 < trained[TRAINING] < 1
    assert all(0 < record.train_s < record.run_s for record in records if record.header.experiment == TRAINING)


def test_report_is_plain_json_with_the_promised_fields(healthy: Ended) -> None:
    report = json.loads((healthy.directory / "report.json").read_text())
    promised = {"schema", "environment", "profile", "planned", "executed", "verdicts", "exit_code", "cases"}
    assert promised <= report.keys()
    fields = {"id", "law", "cell", "verdict", "reason", "duration_s", "wait_s", "measured", "repro"}
    for case in report["cases"]:
        assert fields <= case.keys()
        for metric in case["measured"].values():
            assert {"kind", "value", "lower", "upper", "unit"} <= metric.keys()
    measured = next(case["measured"] for case in report["cases"] if case["law"] == "PAR-1")
    assert 0 <= measured["loss"]["value"] <= measured["loss"]["upper"] < 1e-4
    assert measured["loss"]["formula"] == "u (3 F + sqrt(tokens))"
    assert measured["loss"]["terms"].keys() == {"u", "F", "tokens"}
    silent = {case["law"] for case in report["cases"] if not case["measured"]}
    assert silent <= {"ENV-1", "ENV-4"}, "laws that put no metric into the report"


def test_lines_of_the_stream(healthy: Ended) -> None:
    first, *lines, last = (healthy.directory / "report.jsonl").read_text().splitlines()
    header, footer = msgspec.json.decode(first, type=Header), msgspec.json.decode(last, type=Footer)
    report = healthy.report
    assert (header.session, header.environment) == (report.session, report.environment)
    assert (footer.planned, footer.executed, footer.exit_code) == (report.planned, report.executed, 0)
    cases = [json.loads(line) for line in lines]
    assert {case.pop("type") for case in cases} == {"case"}
    decoded = [msgspec.convert(case, CaseResult) for case in cases]
    assert sorted(decoded, key=lambda case: case.id) == report.cases
    assert decoded[0].law.startswith("ENV-"), "preconditions come first"


def test_junit(healthy: Ended) -> None:
    root = ET.parse(healthy.directory / "junit.xml").getroot()
    assert len(list(root.iter("testcase"))) == healthy.report.planned
    (test_suite,) = root.iter("testsuite")
    assert [test_suite.get(key) for key in ("name", "failures", "errors", "skipped")] == ["conformance", "0", "0", "1"]
    torch = healthy.report.environment["packages"]["torch"]
    assert properties(test_suite).items() >= {"torch": torch, "profile": "pr", "exit_code": "0"}.items()
    known = {(case.law, case.cell): case for case in healthy.report.cases}
    for testcase in root.iter("testcase"):
        named = properties(testcase)
        case = known.pop((named["law"], named["cell"]))
        assert (named["verdict"], named["substrate"], named["torch"]) == (case.verdict, case.substrate, torch)
    assert not known


def properties(element: ET.Element) -> dict[str, str]:
    return {entry.attrib["name"]: entry.attrib["value"] for entry in element.iterfind("properties/property")}


def test_output(healthy: Ended) -> None:
    report = healthy.report
    for law, number in Counter(case.law for case in report.cases).items():
        assert re.search(rf"^{law} +{number} +[\d.]+$", healthy.output, re.MULTILINE), healthy.output
    assert f"{report.planned} of {report.planned} cases executed" in healthy.output
    assert f"exit status 0; report: {healthy.directory}" in healthy.output


def test_a_cell_runs_once(healthy: Ended) -> None:
    require_single_runs(healthy)


def require_single_runs(session: Ended) -> None:
    """Require one record for each run of a cell and each experiment, and no more cases that ran than records."""
    records = list((session.directory / "records").iterdir())
    headers = [json.loads((record / "record.json").read_bytes())["header"] for record in records]
    cells = [record.name.partition("--")[0] for record in records]
    runs = {(cell, header["experiment"], header["repeat"]) for cell, header in zip(cells, headers, strict=True)}
    assert len(runs) == len(records)
    assert set(cells) >= {case.cell for case in session.report.cases}
    ran = [case.id for case in session.report.cases if case.run_s > 0]
    assert 0 < len(ran) <= len(records)


def test_workers_share_the_records_and_agree(healthy: Ended, tmp_path: Path) -> None:
    directory = tmp_path / "report"
    shared = finish(suite(directory, "conformance/", *HEALTHY[:2], "--laws=PAR-1,PAR-4,PAR-5", workers=2), directory)
    assert shared.status == 0, shared.output
    assert shared.verdicts.items() <= healthy.verdicts.items()
    require_single_runs(shared)


# Failures


@pytest.fixture(scope="module")
def defective(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    directory = tmp_path_factory.mktemp("defective") / "report"
    options = [*TWO_CASES, "--defect", "grads-summed"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GITHUB_ACTIONS", "true")
        return finish(suite(directory, "conformance/", *options), directory)


def test_a_defective_product(defective: Ended) -> None:
    report = defective.report
    assert (defective.status, report.exit_code, report.defect) == (1, 1, "grads-summed")
    (failed,) = [case for case in report.cases if case.verdict != "pass"]
    assert (failed.law, failed.verdict) == ("PAR-1", "fail")
    bound = r"bound \S+e-05 = u \(3 F \+ sqrt\(tokens\)\)"
    assert re.match(rf"gradient at step 0 of \S+: relative Frobenius deviation \S+, {bound}; norm ", failed.reason)
    assert any(f.value and f.upper and f.value > 100 * f.upper for f in failed.measured.values())
    assert f"fail: {failed.id}: {failed.reason}" in defective.output
    assert f"repeat: {failed.repro}" in defective.output
    assert f"\n::error title=fail%3A {failed.id}::{failed.reason}" in defective.output


def test_a_failed_comparison_is_told_once(defective: Ended) -> None:
    """Pytest names the case; neither a traceback nor a repeated reason would help a reader."""
    (failed,) = [case for case in defective.report.cases if case.verdict == "fail"]
    assert "FAILURES" not in defective.output
    assert "Traceback" not in defective.output
    assert defective.output.count(failed.must) == 1
    assert len(defective.output.splitlines()) < 45, defective.output
    assert re.search(rf"^FAILED {re.escape(failed.nodeid)}", defective.output, re.MULTILINE)


def test_a_case_can_be_repeated(defective: Ended, tmp_path: Path) -> None:
    """The command in the report runs the case alone, with its profile and defect."""
    (failed,) = [case for case in defective.report.cases if case.verdict == "fail"]
    directory = tmp_path / "repeated"
    command = [*shlex.split(failed.repro), f"--report-dir={directory}"]
    assert command[0] == "pytest"
    repeated = finish([str(Path(sys.executable).with_name("pytest")), *command[1:]], directory)
    assert repeated.report.planned == 1
    (case,) = repeated.report.cases
    assert (case.id, case.verdict, case.reason, case.repro) == (failed.id, "fail", failed.reason, failed.repro)
    assert repeated.status == 1


def busy_rank(session: psutil.Process) -> tuple[psutil.Process, int] | None:
    """Return the last rank of a busy world, and its number; `rankN.out` is its output, next to the rendezvous."""
    for process in session.children(recursive=True):
        try:
            output = Path(f"/proc/{process.pid}/fd/1").readlink()
        except OSError:  # it has ended, or is not ours to look at
            continue
        match = re.fullmatch(r"rank(\d+)\.out", output.name)
        if match and any(output.parent.glob("rendezvous*")) and int(match[1]) == 1:
            return process, int(match[1])
    return None


def test_a_killed_rank_costs_one_case(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(session: psutil.Process) -> bool:
        busy = busy_rank(session)
        if busy is None:
            return False
        process, number = busy
        process.kill()
        killed.append(number)
        return True

    directory = tmp_path / "report"
    session = finish(suite(directory, "conformance/", *SIX_CASES), directory, act=kill)
    assert killed == [1]
    report = session.report
    crashed = [case for case in report.cases if case.verdict == "crash"]
    assert report.executed == report.planned == 6
    assert report.verdicts == {"pass": 5, "crash": 1}, session.output
    assert crashed[0].reason == "rank 1 was killed by SIGKILL"
    assert "--- rank 0 " in session.output
    assert session.status == report.exit_code == 1
    assert session.descendants
    assert alive(session.descendants) == []


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 0), (signal.SIGTERM, 2)])
def test_an_interrupted_session_is_incomplete(tmp_path: Path, number: int, workers: int) -> None:
    directory = tmp_path / "report"

    sent_s: list[float] = []

    def interrupt(session: psutil.Process) -> bool:
        """Send the signal twice after the first record, as `timeout` does, while another cell may be running."""
        if not any(directory.glob("records/*/record.json")):
            return False
        for _ in range(2):
            session.send_signal(number)
        sent_s.append(time.monotonic())
        return True

    command = suite(directory, "conformance/", *SIX_CASES, workers=workers)
    session = finish(command, directory, act=interrupt)
    assert time.monotonic() - sent_s[0] < ENDING_LIMIT_S, session.output
    report = session.report
    assert session.status == report.exit_code == 5, session.output
    assert report.planned == len(report.cases) == 6
    assert report.executed < 6
    unfinished = [case for case in report.cases if case.verdict == "not-run"]
    assert len(unfinished) == 6 - report.executed
    told = [line for line in session.output.splitlines() if line.startswith("not-run, ")]
    cases = "1 case" if len(unfinished) == 1 else f"{len(unfinished)} cases"
    assert told == [f"not-run, {cases}: the session ended before this case"]
    for case in unfinished:
        assert case.reason == "the session ended before this case"
        assert "MUST" in case.must
        assert case.nodeid in shlex.split(case.repro)
    stream = (directory / "report.jsonl").read_text().splitlines()
    assert len(stream) == 2 + report.executed
    assert msgspec.json.decode(stream[-1], type=Footer).exit_code == 5
    assert session.descendants
    assert alive(session.descendants) == []
    assert not list(directory.glob("plan*"))


def test_an_expired_waiver_waives_nothing_and_is_one_line(tmp_path: Path) -> None:
    for name in ("matrix.yaml", "matrix.lock"):
        shutil.copy(PROJECT / name, tmp_path)
    waivers = (PROJECT / "waivers.yaml").read_text()
    assert "INIT-8" in waivers
    (tmp_path / "waivers.yaml").write_text(re.sub(r"expires: \S+", "expires: 2026-01-31", waivers))
    directory = tmp_path / "report"
    options = ["--laws", "INIT-8", "--cells", WAIVED_CELL, "--matrix", str(tmp_path / "matrix.yaml")]
    session = finish(suite(directory, "conformance/", *options), directory)
    assert (session.status, session.verdicts) == (1, {f"INIT-8/{WAIVED_CELL}": "fail"}), session.output
    (warning,) = [line for line in session.output.splitlines() if line.startswith("expired waivers waive nothing: ")]
    assert "INIT-8 (https://github.com/pytorch/pytorch/issues/168058, until 2026-01-31)" in warning


def test_nothing_selected_is_no_result(tmp_path: Path) -> None:
    directory = tmp_path / "report"
    session = finish(suite(directory, "conformance/", "--cells", "mesh = dp2048"), directory)
    report = session.report
    assert (session.status, report.exit_code, report.planned, report.executed) == (5, 5, 0, 0)
    assert report.cases == []


# Mistakes of authors of laws


def test_broken_law_modules_are_the_suites_failure(tmp_path: Path) -> None:
    """A module cannot be imported, and another asserts a law a second time."""
    program = "@law('PAR-5', where='world > 1', reference='')\ndef test_twice(run, cell):\n    'It MUST.'\n"
    (tmp_path / "test_more.py").write_text(f"from conformance.judge.law import law\n{program}")
    (tmp_path / "test_broken.py").write_text("import nonsense\n")
    directory = tmp_path / "report"
    arguments = ["conformance/", str(tmp_path / "test_more.py"), str(tmp_path / "test_broken.py")]
    session = finish(suite(directory, *arguments, f"--rootdir={PROJECT}", *TWO_CASES), directory)
    assert session.status == session.report.exit_code == 3, session.output
    assert session.report.executed == 0
    assert "No module named 'nonsense'" in session.output
    assert re.search(r"law PAR-5 is asserted by \S+test_replicas_are_equal and by \S+test_twice", session.output)


# Activation


def test_other_sessions_are_left_alone(tmp_path: Path) -> None:
    directory = tmp_path / "report"
    session = finish(suite(directory, "tests/fast/run/test_records.py"), directory)
    assert session.status == 0, session.output
    assert "exit status" not in session.output
    assert not directory.exists()
