"""`python -m conformance docs`: generated parts of the documentation are current, and stale ones are told."""

from pathlib import Path

import msgspec
import pytest

from conformance.__main__ import main
from conformance.cli import docs
from conformance.cli.blocks import block, with_block
from conformance.cli.docs import Duration, Measured, generated
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


def test_a_duration_of_other_cases_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "measured.json"
    smoke = Duration(
        cases=len(load_matrix(PROJECT / "matrix.yaml").cases("smoke")) + 1, duration_s=60, processors=2, torch="2.13.0"
    )
    file.write_bytes(msgspec.json.encode(Measured(profiles={"smoke": smoke})))
    monkeypatch.setattr(docs, "MEASURED_FILE", file)
    with pytest.raises(ValueError, match=r"has the duration of \d+ cases of profile smoke, which has \d+ now: measure"):
        generated()


def test_a_table_of_versions_with_other_cases_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    versions = (PROJECT / "docs" / "versions.md").read_text()
    stale = with_block(versions, "versions", "Profile `smoke`, 7 cases for each version of torch.")
    for name in ("matrix.yaml", "README.md"):
        (tmp_path / name).symlink_to(PROJECT / name)
    (tmp_path / "docs" / "versions.md").write_text(stale)
    monkeypatch.setattr(docs, "PROJECT", tmp_path)
    with pytest.raises(ValueError, match=r"docs/versions.md is not of profile smoke with its \d+ cases"):
        generated()
