"""Sessions of the suite in separate processes: reports, failures, interruptions, and pytest's own selections."""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import pytest
from filelock import FileLock

from conformance.detection.case_judge import the_matrix
from conformance.project import PROJECT
from conformance.report.schema import CaseResult, Footer, Header, Report
from conformance.run.experiment import TRAINING
from conformance.run.record import RecordFile
from tests.support import warm_servers
from tests.support.forked import RANK_SERVERS_VARIABLE
from tests.support.sessions import (
    CELL,
    LIMIT_S,
    PYTEST,
    SIX_CASES,
    TWO_CASES,
    Ended,
    Printed,
    alive,
    finish,
    finish_together,
    start,
    suite,
)

# Two kinds of meshes, laws that compare one cell or two, and the laws on the environment.
HEALTHY = (
    *("--cells", "id in (tp2-fp32-default-meta, dp2-fp32-default-meta-fpre1)"),
    *("--laws", "ENV-*,AXIS-1,INIT-1,MP-1,PAR-1,PAR-4,PAR-5,RS-1"),
)
FAILED, PASSED = f"PAR-1/{CELL}", f"PAR-5/{CELL}"
LAWS, OTHER = "conformance/laws/numerics/test_par.py", "conformance/laws/preconditions/test_env.py"
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


def test_measured_numbers_are_plain_json_with_the_derivation_of_their_bound(healthy: Ended) -> None:
    cases = json.loads((healthy.directory / "report.json").read_text())["cases"]
    loss = next(case["measured"] for case in cases if case["law"] == "PAR-1")["loss"]
    assert {"kind", "value", "lower", "upper", "unit"} <= loss.keys()
    assert 0 <= loss["value"] <= loss["upper"] < 1e-4
    assert (loss["formula"], loss["terms"].keys()) == ("u (3 F + sqrt(tokens))", {"u", "F", "tokens"})
    assert {case["law"] for case in cases if not case["measured"]} <= {"ENV-1", "ENV-4"}, "laws without a metric"


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


def test_workers_share_records(tmp_path: Path) -> None:
    four_cases = ("--cells", f"id in ({CELL}, dp2-fp32-default-meta-tied)", *TWO_CASES[2:])
    shared = finish(suite(tmp_path, "conformance/", *four_cases, workers=2), tmp_path)
    assert (shared.status, shared.report.verdicts) == (0, {"pass": 4}), shared.output
    require_single_runs(shared)


def streamed_cases(directory: Path) -> list[dict[str, str]]:
    """Return the cases in the order in which their results arrived."""
    stream = map(json.loads, (directory / "report.jsonl").read_text().splitlines())
    return [line for line in stream if line["type"] == "case"]


# Failures


@pytest.fixture(scope="module")
def defective(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Return a session of two cases, of which one fails, with pytest's cache beside its report."""
    directory = tmp_path_factory.mktemp("defective") / "report"
    # Pytest warns of modules that a warm process has imported before.
    options = [*TWO_CASES, "--defect", "grads-summed", "--disable-warnings"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GITHUB_ACTIONS", "true")
        return finish(suite(directory, "conformance/", *options, cache=directory.with_name("cache")), directory)


def test_a_defective_product(defective: Ended) -> None:
    report = defective.report
    assert (defective.status, report.exit_code, report.defect) == (1, 1, "grads-summed")
    assert defective.verdicts == {FAILED: "fail", PASSED: "pass"}, defective.output
    failed = report.cases[0]
    bound = r"bound \S+e-05 = u \(3 F \+ sqrt\(tokens\)\)"
    assert re.match(rf"gradient at step 0 of \S+: relative Frobenius deviation \S+, {bound}; norm ", failed.reason)
    assert any(f.value and f.upper and f.value > 100 * f.upper for f in failed.measured.values())
    assert f"fail: {failed.id}: {failed.reason}" in defective.output
    assert f"repeat: {failed.repro}" in defective.output
    assert f"\n::error title=fail%3A {failed.id}::{failed.reason}" in defective.output


def test_a_failed_comparison_is_told_once(defective: Ended) -> None:
    """Pytest names the case; neither a traceback nor a repeated reason would help a reader."""
    failed = defective.report.cases[0]
    assert "FAILURES" not in defective.output
    assert "Traceback" not in defective.output
    assert defective.output.count(failed.must) == 1
    assert len(defective.output.splitlines()) < 40, defective.output
    assert re.search(rf"^FAILED {re.escape(failed.nodeid)}", defective.output, re.MULTILINE)


def test_a_case_can_be_repeated(defective: Ended, tmp_path: Path) -> None:
    """The command in the report runs the case alone, with its profile and defect."""
    failed = defective.report.cases[0]
    directory = tmp_path / "repeated"
    command = [*shlex.split(failed.repro), f"--report-dir={directory}", "--shrink=0", "--explain=0"]
    assert command[0] == "pytest"
    repeated = finish([*PYTEST, *command[1:]], directory)
    assert repeated.report.planned == 1
    (case,) = repeated.report.cases
    assert (case.id, case.verdict, case.reason, case.repro) == (failed.id, "fail", failed.reason, failed.repro)
    assert repeated.status == 1


def busy_rank(session: psutil.Process) -> tuple[psutil.Process, int] | None:
    """Return the last rank of a busy world, and its number; `rankN.out` is its output, next to its assignment."""
    for process in session.children(recursive=True):
        try:
            output = Path(f"/proc/{process.pid}/fd/1").readlink()
        except OSError:  # it has ended, or is not ours to look at
            continue
        match = re.fullmatch(r"rank(\d+)\.out", output.name)
        if match and int(match[1]) == 1 and is_newer(output.with_name("assignment"), output.with_suffix(".report")):
            return process, int(match[1])
    return None


def is_newer(file: Path, other: Path) -> bool:
    """Return whether a file was written after another one, which may be missing."""
    return file.exists() and (not other.exists() or file.stat().st_mtime_ns > other.stat().st_mtime_ns)


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
        """Send the signal twice after the first case, as `timeout` does, while another cell may be running."""
        if not (directory / "report.jsonl").exists():
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
    laws = "1 law" if len({case.law for case in unfinished}) == 1 else f"{len({case.law for case in unfinished})} laws"
    assert told == [f"not-run, {cases} of {laws}: the session ended before this case"]
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


# Selections by pytest's options, and sessions without an ended case


def command(defective: Ended, copy: Path, *arguments: str) -> tuple[list[str], Path]:
    """Return a command that repeats the session without its defect, in copies of its report and cache."""
    for name in ("report", "cache"):
        shutil.copytree(defective.directory.with_name(name), copy / name)
    return suite(copy / "report", *arguments, cache=copy / "cache"), copy / "report"


@pytest.mark.parametrize(
    ("arguments", "cases", "selections"),
    [
        (["conformance/", "--lf", "-n1"], [FAILED], ["--lf"]),
        ([LAWS, "--ff", f"--deselect={OTHER}"], [FAILED, PASSED], [LAWS, f"--deselect {OTHER}"]),
    ],
    ids=["last-failed", "failed-first"],
)
def test_cases_are_selected_and_ordered(
    defective: Ended, tmp_path: Path, arguments: list[str], cases: list[str], selections: list[str]
) -> None:
    ended = finish(*command(defective, tmp_path, *TWO_CASES, *arguments))
    assert (ended.status, ended.report.defect) == (0, None), ended.output
    assert all(selection in ended.report.selection for selection in selections)
    assert [line["id"] for line in streamed_cases(ended.directory)] == cases


COLLECTED = {
    f"conformance/ --ignore={LAWS} --laws=PAR-*,MP-*": {"test_mp.py"},
    "conformance/ --ignore-glob=*_[a-l]*.py --laws=PAR-*,CLIP-*": {"test_par.py"},
    f"conformance/ --deselect={LAWS} --laws=PAR-*,MP-*": {"test_mp.py"},
    LAWS: {"test_par.py"},
    "conformance/ --laws=par-5": {"test_par.py"},
}
"""Files of laws by arguments that collect them on a cell which has cases in several files."""
WITHOUT_AN_ENDED_CASE = {
    "conformance/ -k typo": 5,
    "conformance/ --cells 'mesh = dp2048'": 5,
    "conformance/ --profile smok": 4,
    "conformance/laws/test_none.py": 4,
    "conformance/laws/test_none.py -n1": 4,
    f"conformance/ --lf --deselect {LAWS}": 5,
    "conformance/": 4,
}
"""Exit status by arguments; another session holds the directory of the last one."""


class Brief(NamedTuple):
    """End of a session that judges nothing, in a directory with an earlier report."""

    ended: Printed
    directory: Path
    is_report_kept: bool


@pytest.fixture(scope="module")
def brief(defective: Ended, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Brief]:
    """Return how sessions that judge nothing end, by their arguments, in one process: starts take longest."""
    directory = tmp_path_factory.mktemp("brief")
    collecting = dict.fromkeys(COLLECTED, ("--cells", "id = dp2-fp32-default-meta", "--collect-only", "-q"))
    selections = collecting | dict.fromkeys(WITHOUT_AN_ENDED_CASE, TWO_CASES)
    commands = [
        command(defective, directory / str(number), *options, *shlex.split(arguments))
        for number, (arguments, options) in enumerate(selections.items())
    ]
    before = files(defective.directory)
    with FileLock(commands[-1][1] / "session.lock"):
        sessions = finish_together([(PROJECT, words[len(PYTEST) :]) for words, _ in commands], directory)
    return {
        arguments: Brief(ended, report, files(report) == before)
        for arguments, ended, (_, report) in zip(selections, sessions, commands, strict=True)
    }


def files(directory: Path) -> dict[Path, bytes]:
    present = (file for file in directory.rglob("*") if file.is_file() and file.suffix != ".lock")
    return {file.relative_to(directory): file.read_bytes() for file in present}


@pytest.mark.parametrize("arguments", COLLECTED)
def test_cases_are_collected_and_the_report_stays(brief: dict[str, Brief], arguments: str) -> None:
    """Laws are left out for which this selection collects no test."""
    ended, _, is_report_kept = brief[arguments]
    assert (ended.status, is_report_kept) == (0, True), ended
    assert {*re.findall(r"^conformance/laws/\w+/(\w+\.py)::", ended.out, re.MULTILINE)} == COLLECTED[arguments]


@pytest.mark.parametrize("arguments", WITHOUT_AN_ENDED_CASE)
def test_a_session_without_an_ended_case_keeps_the_earlier_report(brief: dict[str, Brief], arguments: str) -> None:
    ended, directory, is_report_kept = brief[arguments]
    status = WITHOUT_AN_ENDED_CASE[arguments]
    assert (ended.status, is_report_kept) == (status, True), ended
    assert ("keeps the report of an earlier session" in ended.out) == (status == 5)
    assert f"report: {directory}" not in ended.out


def test_a_second_session_in_a_report_directory_is_one_line(brief: dict[str, Brief]) -> None:
    ended, directory, _ = brief["conformance/"]
    assert ended.err.strip() == f"ERROR: --report-dir {directory}: another session writes there; name another one"


def test_sessions_that_judge_nothing_have_no_result(tmp_path: Path) -> None:
    """No case is selected; and a module of laws cannot be imported, while another asserts a law a second time."""
    program = "@law('PAR-5', where='world > 1', reference='')\ndef test_twice(run, cell):\n    'It MUST.'\n"
    (tmp_path / "test_more.py").write_text(f"from conformance.judge.law import law\n{program}")
    (tmp_path / "test_broken.py").write_text("import nonsense\n")
    broken = [str(tmp_path / "test_more.py"), str(tmp_path / "test_broken.py"), f"--rootdir={PROJECT}", *TWO_CASES]
    commands = [
        suite(tmp_path / "none", "conformance/", "--cells", "mesh = dp2048"),
        suite(tmp_path / "broken", "conformance/", *broken),
    ]
    none, failed = finish_together([(PROJECT, words[len(PYTEST) :]) for words in commands], tmp_path)
    reports = [
        msgspec.json.decode((tmp_path / name / "report.json").read_bytes(), type=Report) for name in ("none", "broken")
    ]
    assert (none.status, failed.status) == (5, 3), failed
    assert [(report.exit_code, report.executed) for report in reports] == [(5, 0), (3, 0)]
    assert reports[0].cases == []
    assert "No module named 'nonsense'" in failed.out
    assert re.search(r"law PAR-5 is asserted by \S+test_replicas_are_equal and by \S+test_twice", failed.out)


def test_on_a_terminal_the_short_summary_has_its_words_and_expired_waivers_a_line(tmp_path: Path) -> None:
    """A plugin that wrote a line of progress on terminals once blanked the words of the summary."""
    for name in ("matrix.yaml", "matrix.lock"):
        shutil.copy(PROJECT / name, tmp_path)
    before, law, waivers = (PROJECT / "waivers.yaml").read_text().partition("law: INIT-2\n")
    (tmp_path / "waivers.yaml").write_text(
        before + law + re.sub(r"expires: \S+", "expires: 2026-01-31", waivers, count=1)
    )
    cells = f"{CELL} or dp2-fp32-default-meta"
    options = ["--cells", cells, "--laws", "PAR-1,ENV-4,INIT-8", "--defect", "grads-summed"]
    command = suite(tmp_path / "report", "conformance/", *options, "--matrix", str(tmp_path / "matrix.yaml"))
    output = re.sub(r"\x1b\[[0-9;]*m", "", on_a_terminal(command))  # without colours
    _, _, short_summary = output.partition("short test summary info")
    words = {line.split()[0] for line in short_summary.splitlines() if " conformance/laws/" in line}
    assert words >= {"FAILED", "SKIPPED", "XFAIL"}, output
    assert (
        output.count("expired waivers waive nothing: INIT-2 (https://github.com/pytorch/pytorch/pull/170914, until")
        == 1
    )


def on_a_terminal(command: list[str]) -> str:
    """Run a session on a new terminal; returns the terminal's input."""
    leader, follower = pty.openpty()
    process = start(command, Path(os.ttyname(follower)), {RANK_SERVERS_VARIABLE: warm_servers.address()})
    received = b""

    def hang_up() -> None:
        process.join(LIMIT_S)
        process.kill()
        os.close(follower)

    threading.Thread(target=hang_up).start()
    try:
        while chunk := os.read(leader, 1 << 16):
            received += chunk
    except OSError:  # Linux reports the end of the last process at the other end as an error
        pass
    finally:
        os.close(leader)
    return received.decode()


def test_a_long_session_tells_at_its_start_what_it_will_take(tmp_path: Path) -> None:
    """The seconds of matrix.lock are scaled to this machine; two laws of a cell take no more than all of its laws."""
    shutil.copy(PROJECT / "matrix.yaml", tmp_path)
    shutil.copy(PROJECT / "waivers.yaml", tmp_path)
    lock = (PROJECT / "matrix.lock").read_text()
    longer, changed = re.subn(rf"~?[0-9.]+(?=  {CELL}\n)", "60.00", lock)
    assert changed == 1
    (tmp_path / "matrix.lock").write_text(longer)
    matrix = ("--matrix", str(tmp_path / "matrix.yaml"))
    ended = finish(suite(tmp_path / "report", "conformance/", *TWO_CASES, *matrix), tmp_path / "report")
    report = ended.report
    assert (ended.status, report.workers) == (0, 1), ended.output
    assert report.calibration_s is not None
    assert report.expected_s is not None
    assert report.expected_s > 60.0 * report.calibration_s / the_matrix().calibration_s
    assert f"expected: at most {report.expected_s:.0f} s" in ended.output
    assert f"executed in {report.duration_s:.1f} s ({report.expected_s:.0f} s expected)" in ended.output
    assert len(list((tmp_path / "report" / "records").iterdir())) == 1, "the calibration leaves no record"
