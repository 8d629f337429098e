"""Wrong inputs of a user: each row of `wrong_inputs.txt` ends with its exit status and its first line, no traceback.

A row is a command, after `$`, and below it the exit status and the first line, where `...` stands for anything. A line
above the command, `FILE: OLD -> NEW`, is an edit of a file before the command. Commands begin with `conformance` for
`python -m conformance`, `trainer` for `python -m reference_trainer`, or `pytest`; `files` makes what they name.
"""

import importlib.metadata
import os
import re
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import pytest

from conformance.detection.case_judge import the_matrix
from conformance.project import PROJECT
from tests.support.sessions import Printed, finish_together

FILE = Path(__file__).with_name("wrong_inputs.txt")
MATRIX = """\
schema: 2
axes:
  mesh: [dp2, tp2]
  reshard: [default, never]
  optimizer: [adamw, sgd]
cells:
  singles: {note: each feature alone, meshes: [dp2]}
  pairs: {note: any two meet, strength: 2}
exclusions:
  - {when: mesh = tp2 and reshard = never, reason: one rank holds all, reference: nowhere}
profiles:
  pr: {note: all, must: [singles, pairs], deadline_s: 60}
"""
WAIVERS = """\
schema: 1
waivers:
  - law: PAR-1
    cells: mesh = dp2
    device: cpu
    torch: "2.6 - 2.15"
    issue: https://github.com/pytorch/pytorch/issues/1
    reason: a fault
    expires: 2099-12-31
    shows: [{metric: loss, least: 1, most: 2}]
"""


class Row(NamedTuple):
    """Input, with its exit status and first line."""

    edit: str
    """`FILE: OLD -> NEW`, with NEW as in a string of Python; empty if no file is edited."""
    command: str
    status: int
    line: str
    """First line that is printed; `...` stands for anything."""

    @property
    def id(self) -> str:
        return f"{self.edit}; {self.command}" if self.edit else self.command

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command)


def rows() -> list[Row]:
    blocks = re.findall(r"^(?:([^#$\n].*)\n)?\$ (.*)\n(\d+) (.*)$", FILE.read_text(), re.MULTILINE)
    return [Row(edit, command, int(status), line) for edit, command, status, line in blocks]


def rows_of(program: str) -> pytest.MarkDecorator:
    """Return a decorator for a test that is called with each row of a program."""
    chosen = [row for row in rows() if row.words[0] == program]
    return pytest.mark.parametrize("row", chosen, ids=[row.id for row in chosen])


def require(row: Row, ended: Printed) -> None:
    said = [line for line in (ended.err or ended.out).splitlines() if line.strip()]
    assert "Traceback" not in ended.err + ended.out
    assert ended.status == row.status, said
    assert re.fullmatch(".*".join(map(re.escape, row.line.split("..."))), said[0]), said[0]


# Files that commands name


def files(directory: Path) -> None:
    """Write the files that commands name: some with mistakes, and reports of several kinds."""
    from conformance.report.coverage import session_coverage
    from conformance.report.facts import suite_digest
    from tests.support.matrices import write_matrix
    from tests.support.sample_reports import case, report

    (directory / "empty").mkdir()
    (directory / "file").write_text("a file")
    os.mkfifo(directory / "pipe")
    (directory / "empty.yaml").touch()
    (directory / "word.yaml").write_text("word")
    (directory / "binary.yaml").write_bytes(b"\xff\xfe")
    write_matrix(directory / "matrix.yaml", MATRIX)
    (directory / "waivers.yaml").write_text(WAIVERS)
    (directory / "config.yaml").write_text((PROJECT / "reference_trainer/configs/tiny.yaml").read_text())
    (directory / "defect.py").write_text("import nonsense\n")
    (directory / "fault.py").write_text("fault = 1\n")
    good = report(case("PAR-1/dp2-fp32-default-meta"))
    replaced = partial(msgspec.structs.replace, good)
    matrix = the_matrix()
    unjudged = report(
        suite_digest=suite_digest(),
        matrix_digest=matrix.digest,
        coverage=session_coverage(matrix, good.profile, []),
        exit_code=5,
    )
    here = {"packages": {"torch": importlib.metadata.version("torch")}, "hardware": {}, "max_world_size": 8}
    for name, content in {
        "good": good,
        "cut": msgspec.json.encode(good)[:300],
        "list": b"[]",
        "other-suite": replaced(suite_digest="another"),
        "ended-early": replaced(planned=2),
        "foreign": replaced(environment={}),
        "unjudged": msgspec.structs.replace(unjudged, environment=here),
    }.items():
        (directory / name).mkdir()
        encoded = content if isinstance(content, bytes) else msgspec.json.encode(content)
        (directory / name / "report.json").write_bytes(encoded)
    (directory / "unjudged" / "report.jsonl").write_bytes(stream_of(unjudged))


def stream_of(report: Any) -> bytes:
    """Return report.jsonl of a report without cases."""
    from conformance.report.schema import Footer, Header

    fields = msgspec.structs.asdict(report)
    lines = [
        Struct(**{name: fields[name] for name in Struct.__struct_fields__ if name != "schema"})
        for Struct in (Header, Footer)
    ]
    return b"\n".join(map(msgspec.json.encode, lines))


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the files that commands name."""
    directory = tmp_path_factory.mktemp("given")
    files(directory)
    return directory


def place(row: Row, given: Path, directory: Path) -> Path:
    """Return the directory of the files that the command names: a copy if the row edits a file."""
    if not row.edit:
        return given
    match = re.fullmatch(r"(\S+): (.*) -> (.*)", row.edit)
    assert match, row.edit
    name, old, new = match.groups()
    shutil.copytree(given, directory, ignore=shutil.ignore_patterns("pipe"))
    text = (directory / name).read_text()
    assert old in text, f"{name} has no {old}"
    (directory / name).write_text(text.replace(old, new.encode().decode("unicode_escape"), 1))
    return directory


@pytest.fixture
def entered(row: Row, given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in the directory of a row."""
    monkeypatch.chdir(place(row, given, tmp_path / "edited"))


# Programs


@pytest.mark.usefixtures("entered")
@rows_of("conformance")
def test_commands(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    from conformance.__main__ import main

    status = main(row.words[1:])
    require(row, Printed(status, *capsys.readouterr()))


@pytest.mark.usefixtures("entered")
@rows_of("trainer")
def test_the_trainer(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    from reference_trainer.__main__ import main

    with (
        patch.object(sys, "argv", ["reference_trainer", *row.words[1:]]),
        patch("reference_trainer.__main__.init_process_group", side_effect=AssertionError("it would train")),
    ):
        status = main()
    require(row, Printed(status, *capsys.readouterr()))


@pytest.fixture(scope="module")
def sessions(given: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Printed]:
    """Return how sessions end, by row."""
    chosen = [row for row in rows() if row.words[0] == "pytest"]
    directory = tmp_path_factory.mktemp("sessions")
    commands = [
        (place(row, given, directory / str(index)), [str(PROJECT / row.words[1]), "-pno:cacheprovider", *row.words[2:]])
        for index, row in enumerate(chosen)
    ]
    return dict(zip([row.id for row in chosen], finish_together(commands, directory), strict=True))


@rows_of("pytest")
def test_sessions(row: Row, sessions: dict[str, Printed]) -> None:
    require(row, sessions[row.id])


def test_the_table_is_read_as_a_whole() -> None:
    assert len(rows()) == FILE.read_text().count("\n$ ") >= 85
    assert len({row.id for row in rows()}) == len(rows())
    assert {row.words[0] for row in rows()} == {"conformance", "trainer", "pytest"}


# Mistakes of the programs themselves


def test_a_bug_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in a command, in the set-up of a session, and in the trainer."""
    import conformance.__main__
    import reference_trainer.__main__
    from conformance.pytest_plugin.setup import read_options

    config: Any = SimpleNamespace(option=SimpleNamespace(report_dir=tmp_path, matrix=None))
    monkeypatch.setattr(sys, "argv", ["reference_trainer", "--config", "config.yaml"])
    for name, call in {
        "conformance.cli.list_cells.load_matrix": lambda: conformance.__main__.main(["list"]),
        "conformance.pytest_plugin.setup.load_matrix": lambda: read_options(config),
        "reference_trainer.__main__.load_config": reference_trainer.__main__.main,
    }.items():
        with patch(name, side_effect=ValueError("a bug")), pytest.raises(ValueError, match=r"^a bug$"):
            call()
