"""Options of pytest itself that select cases: they act as in other projects, and no report is lost."""

import json
import os
import pty
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from filelock import FileLock

from conformance.project import PROJECT
from tests.support.sessions import CELL, PYTEST, TWO_CASES, Ended, Printed, finish, finish_together, suite

FAILED, PASSED = f"PAR-1/{CELL}", f"PAR-5/{CELL}"
OTHER = "conformance/laws/preconditions/test_env.py"
PLAIN_CELL = ("--cells", "id = dp2-fp32-default-meta")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A session of two cases, of which one fails, with pytest's cache beside its report."""
    directory = tmp_path_factory.mktemp("failed") / "report"
    options = [*TWO_CASES, "--defect", "grads-summed"]
    ended = finish(suite(directory, "conformance/", *options, cache=directory.with_name("cache")), directory)
    assert ended.verdicts == {FAILED: "fail", PASSED: "pass"}, ended.output
    return ended


def command(failed: Ended, copy: Path, *arguments: str) -> tuple[list[str], Path]:
    """Return a command that repeats the session without its defect, in copies of its report and cache."""
    for name in ("report", "cache"):
        shutil.copytree(failed.directory.with_name(name), copy / name)
    return suite(copy / "report", *arguments, cache=copy / "cache"), copy / "report"


@pytest.mark.parametrize(
    ("arguments", "cases", "selection"),
    [
        (["conformance/", "--lf", "-n1"], [FAILED], "--lf"),
        (["conformance/", "--ff", f"--deselect={OTHER}"], [FAILED, PASSED], f"--deselect {OTHER}"),
        (["conformance/laws/numerics/test_par.py", "--laws=par-5"], [PASSED], "conformance/laws/numerics/test_par.py"),
    ],
    ids=["last-failed", "failed-first", "file"],
)
def test_cases_are_selected(
    failed: Ended, tmp_path: Path, arguments: list[str], cases: list[str], selection: str
) -> None:
    ended = finish(*command(failed, tmp_path, *TWO_CASES, *arguments))
    assert ended.status == 0, ended.output
    assert ended.report.defect is None
    assert selection in ended.report.selection
    lines = [json.loads(line) for line in (ended.directory / "report.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines if line["type"] == "case"] == cases, "in this order"


COLLECTED = {
    "conformance/ --ignore=conformance/laws/numerics/test_par.py --laws=PAR-*,MP-*": {"test_mp.py"},
    "conformance/ --ignore-glob=*_[a-l]*.py --laws=PAR-*,CLIP-*": {"test_par.py"},
    "conformance/ --deselect=conformance/laws/numerics/test_par.py --laws=PAR-*,MP-*": {"test_mp.py"},
    "conformance/laws/numerics/test_par.py": {"test_par.py"},
    "conformance/ --laws=par-5": {"test_par.py"},
}
"""Files of laws by arguments that collect them on a cell which has cases in several files."""
WITHOUT_AN_ENDED_CASE = {
    "conformance/ -k typo": 5,
    "conformance/ --cells 'mesh = dp2048'": 5,
    "conformance/ --profile smok": 4,
    "conformance/laws/test_none.py": 4,
    "conformance/laws/test_none.py -n1": 4,
    "conformance/ --lf --deselect conformance/laws/numerics/test_par.py": 5,
}
"""Exit status by arguments."""


class Kept(NamedTuple):
    """End of a session in a directory with an earlier report."""

    ended: Printed
    directory: Path
    is_report_kept: bool


@pytest.fixture(scope="module")
def kept(failed: Ended, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kept]:
    """Return how sessions without an ended case end, by their arguments."""
    directory = tmp_path_factory.mktemp("kept")
    collecting = dict.fromkeys(COLLECTED, (*PLAIN_CELL, "--collect-only", "-q"))
    selections = collecting | dict.fromkeys(WITHOUT_AN_ENDED_CASE, TWO_CASES)
    commands = [
        command(failed, directory / str(number), *options, *shlex.split(arguments))
        for number, (arguments, options) in enumerate(selections.items())
    ]
    before = files(failed.directory)
    sessions = finish_together([(PROJECT, words[len(PYTEST) :]) for words, _ in commands], directory)
    return {
        arguments: Kept(ended, report, files(report) == before)
        for arguments, ended, (_, report) in zip(selections, sessions, commands, strict=True)
    }


def files(directory: Path) -> dict[Path, bytes]:
    return {
        file.relative_to(directory): file.read_bytes()
        for file in directory.rglob("*")
        if file.is_file() and file.suffix != ".lock"
    }


@pytest.mark.parametrize("arguments", COLLECTED)
def test_cases_are_collected_and_the_report_stays(kept: dict[str, Kept], arguments: str) -> None:
    """Laws are left out for which this selection collects no test."""
    ended, _, is_report_kept = kept[arguments]
    assert ended.status == 0, ended
    assert {*re.findall(r"^conformance/laws/\w+/(\w+\.py)::", ended.out, re.MULTILINE)} == COLLECTED[arguments]
    assert is_report_kept


@pytest.mark.parametrize("arguments", WITHOUT_AN_ENDED_CASE)
def test_a_session_without_an_ended_case_keeps_the_earlier_report(kept: dict[str, Kept], arguments: str) -> None:
    ended, directory, is_report_kept = kept[arguments]
    status = WITHOUT_AN_ENDED_CASE[arguments]
    assert ended.status == status, ended
    assert is_report_kept
    assert ("keeps the report of an earlier session" in ended.out) == (status == 5)
    assert f"report: {directory}" not in ended.out


def test_a_second_session_in_a_report_directory_is_one_line(failed: Ended, tmp_path: Path) -> None:
    repeated, directory = command(failed, tmp_path, *TWO_CASES, "conformance/")
    before = files(directory)
    with FileLock(directory / "session.lock"):
        ended = finish(repeated, directory)
    assert ended.status == 4
    line = f"ERROR: --report-dir {directory}: another session writes there; name another one"
    assert ended.output.strip() == line
    assert files(directory) == before


def test_on_a_terminal_the_short_summary_has_its_words(failed: Ended, tmp_path: Path) -> None:
    """A plugin that wrote a line of progress on terminals once blanked the words of the summary."""
    cells = f"{CELL} or dp2-fp32-default-meta"
    options = ["--cells", cells, "--laws", "PAR-1,ENV-4,INIT-8", "--defect", "grads-summed"]
    output = on_a_terminal(suite(tmp_path / "report", "conformance/", *options))
    short_summary = output.partition("short test summary info")[2]
    words = {line.split()[0] for line in plain(short_summary).splitlines() if " conformance/laws/" in line}
    assert words >= {"FAILED", "SKIPPED", "XFAIL"}, output


def on_a_terminal(repeated: list[str]) -> str:
    """Run a command on a new terminal; returns the terminal's input."""
    leader, follower = pty.openpty()
    process = psutil.Popen(repeated, cwd=PROJECT, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    received = b""
    try:
        while chunk := os.read(leader, 1 << 16):
            received += chunk
    except OSError:  # Linux reports the end of the last process at the other end as an error
        pass
    finally:
        process.wait(60)
        os.close(leader)
    return received.decode()


def plain(text: str) -> str:
    """Return a text without the sequences that colour it."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
