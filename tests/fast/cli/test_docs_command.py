"""`python -m conformance docs`: generated parts of the documentation are current, and stale ones are told."""

import shutil
from pathlib import Path

import msgspec
import pytest

from conformance.__main__ import main
from conformance.cli import docs
from conformance.cli.blocks import block, with_block
from conformance.cli.docs import Durations, Measured, generated
from conformance.plan.matrix import load_matrix
from conformance.project import PROJECT

PAGE = "before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter <!-- b: begin --><!-- b: end -->\n"


def test_a_block_is_replaced() -> None:
    assert block(PAGE, "a") == "old"
    assert block(PAGE, "b") == ""
    changed = with_block(with_block(PAGE, "a", "new\nlines"), "b", "x")
    assert (block(changed, "a"), block(changed, "b")) == ("new\nlines", "x")
    assert with_block(changed, "a", "old").startswith("before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter")
    with pytest.raises(ValueError, match="no block c: put <!-- c: begin --> and <!-- c: end --> where it belongs"):
        with_block(PAGE, "c", "x")


def test_generated_parts_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0, "python -m conformance docs --write"
    assert capsys.readouterr().out == "up to date\n"


def test_a_stale_page_is_told_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {tmp_path / "stale.md": "new", tmp_path / "missing.md": "all of it", tmp_path / "current.md": "same"}
    (tmp_path / "stale.md").write_text("old")
    (tmp_path / "current.md").write_text("same")
    monkeypatch.setattr(docs, "generated", lambda: texts)
    monkeypatch.setattr(docs, "PROJECT", tmp_path)
    assert main(["docs"]) == 1
    assert (
        capsys.readouterr().out == "stale: stale.md, missing.md; write them with python -m conformance docs --write\n"
    )
    assert main(["docs", "--write"]) == 0
    assert capsys.readouterr().out == "written: stale.md, missing.md\n"
    assert {file: file.read_text() for file in texts} == texts
    assert main(["docs"]) == 0


@pytest.fixture(scope="module")
def smoke_cases() -> int:
    return len(load_matrix(PROJECT / "matrix.yaml").cases("smoke"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what generated parts are made of, and of the files that have them."""
    shutil.copytree(PROJECT / "docs", tmp_path / "docs")
    shutil.copy(PROJECT / "README.md", tmp_path)
    for name in ("conformance", "matrix.yaml", "matrix.lock", "reference_trainer", "waivers.yaml"):
        (tmp_path / name).symlink_to(PROJECT / name)
    monkeypatch.setattr(docs, "PROJECT", tmp_path)
    monkeypatch.setattr(docs, "MEASURED_FILE", tmp_path / "docs" / "measured.json")
    return tmp_path


@pytest.mark.parametrize(("more_cases", "shown"), [(0, "1.4 to 2.0 min on 2 processors"), (1, "installs torch")])
def test_stale_durations_give_way_to_estimates(project: Path, smoke_cases: int, more_cases: int, shown: str) -> None:
    smoke = Durations(cases=smoke_cases + more_cases, durations_s=(90, 84, 120), processors=2, torch="2.13.0")
    measured = Measured(first_command=smoke, profiles={"smoke": smoke})
    (project / "docs" / "measured.json").write_bytes(msgspec.json.encode(measured))
    readme = generated()[project / "README.md"]
    assert shown in block(readme, "first-command")
    assert ("1.4 to 2.0 min, 2 processors" in block(readme, "profiles")) == (more_cases == 0)
    assert block(readme, "profiles").count(" min, estimated") == 3 + more_cases  # the others were not measured
