"""`python -m conformance findings`: its table, its JSON and its exit status, with programs of the test's own."""

import json
from pathlib import Path

import pytest

from conformance.__main__ import main
from conformance.cli import findings as command
from conformance.findings import table

PROGRAM = '''"""The {name} is wrong.

It adds up.

severity: {severity}
visible: silent
training: all of it
thread: https://example.com/issues/12
law: none
avoid: do not
ranks: 1
package: {package}
"""

import sys

print("expected 0, got {status}")
sys.exit({status})
'''


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put programs in the place of those of the project: `sum` shows its fault, `mean` does not.

    Of the packages of the others `other` is installed, and `missing` is not.
    """
    trainers = tmp_path / "trainers"
    trainers.mkdir()
    write(tmp_path / "sum.py")
    write(tmp_path / "mean.py", severity="low", status="0")
    write(trainers / "others.py", package="other")
    write(trainers / "nobodys.py", package="missing")
    for owner in (command, table):
        monkeypatch.setattr(owner, "DIRECTORY", tmp_path)
        monkeypatch.setattr(owner, "TRAINERS", trainers)
    monkeypatch.setattr(command, "CATALOGUE", tmp_path / "README.md")
    monkeypatch.setattr(command, "_version", {"torch": "2.13.0", "other": "1.5", "missing": ""}.__getitem__)
    return tmp_path


def write(file: Path, *, severity: str = "high", status: str = "1", package: str = "torch") -> None:
    file.write_text(PROGRAM.format(name=file.stem, severity=severity, status=status, package=package))


def test_the_table_says_what_the_installed_torch_shows(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["findings"]) == 0
    versions, _, *lines = capsys.readouterr().out.splitlines()
    assert versions == "torch 2.13.0, other 1.5"
    head, _, wrong, right, others = (" ".join(line.split()) for line in lines)
    assert head == "outcome severity finding what training sees"
    assert wrong == "wrong high, silent sum all of it"
    assert right == "right low, silent mean"
    assert others == "wrong high, silent others all of it"


def test_json_has_what_programs_print(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["findings", "sum", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["torch"] == "2.13.0"
    (entry,) = report["findings"]
    assert (entry["name"], entry["outcome"], entry["output"]) == ("sum", "wrong", "expected 0, got 1\n")


def test_a_program_that_fails_by_itself_is_told(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(directory / "sum.py", status="1 / 0")
    assert main(["findings", "sum"]) == 3
    assert "ZeroDivisionError: division by zero" in capsys.readouterr().out


def test_outcomes_are_kept_by_version(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["findings", "--write"]) == 0
    assert json.loads((directory / "versions.json").read_text()) == {"2.13.0": {"sum": "wrong", "mean": "right"}}
    assert json.loads((directory / "trainers" / "versions.json").read_text()) == {"other 1.5": {"others": "wrong"}}
    text = (directory / "README.md").read_text()
    assert "| **wrong** |" in text
    assert "| other 1.5: **wrong** |" in text


@pytest.mark.parametrize(
    ("name", "printed_with", "outcomes"),
    [
        ("sum", "torch 2.13.0", "- 2.9.0: right\n- 2.13.0: wrong\n"),
        ("others", "other 1.5, torch 2.13.0", "- other 1.5: wrong\n"),
    ],
)
def test_a_report_has_the_program_and_its_outcomes(
    directory: Path, capsys: pytest.CaptureFixture[str], name: str, printed_with: str, outcomes: str
) -> None:
    kept = '{"2.9.0": {"sum": "right"}}'
    (directory / "versions.json").write_text(kept)
    assert main(["findings", "--report", name]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"# The {name} is wrong\n\nIt adds up.\n")
    assert 'print("expected 0, got 1")\n' in text
    assert f"It prints with {printed_with}, on CPUs and gloo:\n\n```\nexpected 0, got 1\n```\n" in text
    assert text.endswith(outcomes)
    assert (directory / "versions.json").read_text() == kept


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["summ"], "(did you mean `sum`?)"),
        (["nobodys"], "finding `nobodys` needs missing, which is not installed: pip install missing"),
        (["--limit", "0", "sum"], "0: write a positive number of seconds"),
    ],
)
def test_mistakes_are_told(
    directory: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    assert main(["findings", *arguments]) == 4
    assert problem in capsys.readouterr().err
