"""Commands that need no run: `waive`, `docs` and `coverage`."""

import datetime
import re
import shutil
from pathlib import Path

import msgspec
import pytest
from expecttest import assert_expected_inline

from conformance.__main__ import main
from conformance.cli import docs
from conformance.cli.blocks import block, with_block
from conformance.cli.docs import Durations, Measured, generated
from conformance.cli.waive import NO_ISSUE, draft_waivers
from conformance.detection.case_judge import the_matrix
from conformance.judge.measurements import Measurement
from conformance.judge.waivers import Symptom, Waivers
from conformance.plan.cells import Cell
from conformance.plan.coverage import Coverage, coverage
from conformance.plan.matrix import Case, load_matrix
from conformance.project import PROJECT
from reference_trainer.strict_yaml import convert, load
from tests.support.matrices import write_matrix
from tests.support.sample_reports import case, report

# waive: the reader refuses drafts until an issue's address is filled in

LOSS = Measurement(kind="exact", value=2.5, lower=0.0, upper=0.0, unit="")
TODAY = datetime.date(2026, 11, 22)
FAILED = report(
    case("PAR-1/dp2-fp32-default-meta", "fail"),
    case("PAR-1/dp4-fp32-default-meta", "fail", loss=LOSS),
    case("MP-1/dp2-bf16mp-default-meta", "fail"),
    case("MP-3/dp2-bf16mp-default-meta", "timeout"),
    case("MP-5/dp2-bf16mp-default-meta"),
    torch="2.15.0+cpu",
)


def test_a_draft_for_each_law() -> None:
    assert_expected_inline(
        draft_waivers(FAILED, today=TODAY),
        """\
  - law: PAR-1
    cells: >-
      id = dp4-fp32-default-meta
    device: cpu
    torch: "2.15 - 2.15"
    issue: WRITE THE ADDRESS OF AN ISSUE
    reason: >-
      why fail
    expires: 2027-02-20
    shows:
      - metric: "loss"
        least: 2.5
        most: 2.5
  # fail, which no waiver covers: PAR-1/dp2-fp32-default-meta
  # fail, which no waiver covers: MP-1/dp2-bf16mp-default-meta
  # timeout, which no waiver covers: MP-3/dp2-bf16mp-default-meta""",
    )


def test_a_draft_is_refused_until_there_is_an_issue(tmp_path: Path) -> None:
    odd = msgspec.structs.replace(
        FAILED.cases[0], reason="loss: measured 'x' # 50% [off], " * 12, measured={"loss #1: 'x'": LOSS}
    )
    text = "schema: 1\nwaivers:\n" + draft_waivers(msgspec.structs.replace(FAILED, cases=[odd]), today=TODAY)
    file = tmp_path / "waivers.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match="issue"):
        convert(load(file), Waivers)
    file.write_text(text.replace(NO_ISSUE, "https://github.com/pytorch/pytorch/issues/1"))
    (waiver,) = convert(load(file), Waivers).waivers
    assert waiver.reason == odd.reason.strip()
    assert waiver.shows == [Symptom(metric="loss #1: 'x'", least=2.5, most=2.5)]
    assert waiver.matches(Case("PAR-1", Cell(mesh="dp2")), device="cpu", torch=(2, 15))
    assert not waiver.matches(Case("PAR-1", Cell(mesh="dp4")), device="cpu", torch=(2, 15))


def test_drafts_are_made_of_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_bytes(msgspec.json.encode(FAILED))
    assert main(["waive", "--from", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("  - law: PAR-1")


# docs: generated parts are current, and stale ones are told

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
    stale = "stale: stale.md, missing.md; write them with python -m conformance docs --write\n"
    assert capsys.readouterr().out == stale
    assert main(["docs", "--write"]) == 0
    assert capsys.readouterr().out == "written: stale.md, missing.md\n"
    assert {file: file.read_text() for file in texts} == texts
    assert main(["docs"]) == 0


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources of generated parts, and of the files that have them."""
    shutil.copytree(PROJECT / "docs", tmp_path / "docs")
    shutil.copy(PROJECT / "README.md", tmp_path)
    for name in ("conformance", "matrix.yaml", "matrix.lock", "reference_trainer", "waivers.yaml"):
        (tmp_path / name).symlink_to(PROJECT / name)
    monkeypatch.setattr(docs, "PROJECT", tmp_path)
    monkeypatch.setattr(docs, "MEASURED_FILE", tmp_path / "docs" / "measured.json")
    return tmp_path


@pytest.mark.parametrize("more_cases", [0, 1])
def test_stale_durations_give_way_to_estimates(project: Path, more_cases: int) -> None:
    cases = len(the_matrix().cases("smoke")) + more_cases
    smoke = Durations(cases=cases, durations_s=(90, 84, 120), processors=2, torch="2.13.0")
    measured = Measured(profiles={"smoke": smoke})
    (project / "docs" / "measured.json").write_bytes(msgspec.json.encode(measured))
    readme = generated()[project / "README.md"]
    assert "min, estimated" in block(readme, "first-command")
    assert ("1.4 to 2.0 min, 2 processors" in block(readme, "profiles")) == (more_cases == 0)
    assert block(readme, "profiles").count(" min, estimated") == 3 + more_cases  # the others were not measured


def test_a_measured_first_command_says_on_what(project: Path) -> None:
    """The sentence stays true when the profile has other cases, since it names those that were judged."""
    alone = Durations(cases=7, durations_s=(90,), processors=2, torch="2.13.0", load_before=0.1, processor_s=150)
    shared = msgspec.structs.replace(alone, load_before=4.5)
    shown = []
    for first in (alone, shared):
        (project / "docs" / "measured.json").write_bytes(msgspec.json.encode(Measured(first_command=first)))
        shown.append(block(generated()[project / "README.md"], "first-command"))
    assert "2.5 min of processor time, 1.5 min on 2 processors, for the installation of torch 2.13.0 and 7" in shown[0]
    assert "1.5 min on 2 processors, which other programs shared (load 4.5), for" in shown[1]


# coverage: tables of a small matrix, judged by the laws of the suite

MATRIX = """\
schema: 2
axes: {mesh: [dp2, tp2], compile: [false, true], dropout: [0.0, 0.1], tied_embeddings: [false, true]}
cells:
  plain: {note: why, axes: {mesh: [dp2, tp2], dropout: [0.0, 0.1]}}
exclusions:
  - {when: mesh = tp2 and compile = true, reason: torch refuses it, reference: torch/x.py}
profiles:
  pr: {note: why, must: all, deadline_s: 60}
"""


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    return write_matrix(tmp_path / "matrix.yaml", MATRIX)


def printed(capsys: pytest.CaptureFixture[str], matrix: Path, *options: str) -> str:
    assert main(["coverage", f"--matrix={matrix}", *options]) == 0
    return re.sub(" +", " ", capsys.readouterr().out)


def test_tables(matrix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, matrix)
    assert text.startswith("profile pr: 4 of 4 cells have a law on numbers\n")
    # Of 24 pairs, less the impossible one: mesh and dropout meet, each meets the defaults of the others, and these two.
    assert "\npairs of any values 56.5 % 13 23\n" in text
    assert "\npairs of non-default values 20 % 1 5\n" in text
    by_axis = text.partition("\naxis ")[2].splitlines()[2:6]
    assert [row.split()[0] for row in by_axis] == ["tied_embeddings", "compile", "dropout", "mesh"], "worst first"
    assert "\nmesh = dp2 and compile = true 0\n" in text
    assert "\n1 pair of values excluded:\n" in text
    assert "\n 1 mesh = tp2 and compile = true mesh = tp2 and compile = true torch refuses it\n" in text
    assert re.search(r"\nSTREAM-5 \d+ 4 2 50 % 2 pin_memory = false and ", text)


def test_all_missing_pairs_or_some(matrix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*options: str) -> list[str]:
        table = printed(capsys, matrix, *options).partition("missing pair")[2].partition("\n\n")[0]
        return table.splitlines()[2:]

    assert len(listed("--missing=all")) == len(listed()) == 10
    assert listed("--missing=3")[:3] == listed()[:3]
    assert listed("--missing=3")[3:] == ["... and 7 more: see --missing all"]


def test_json_is_the_coverage(matrix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, matrix, "--json")
    loaded = load_matrix(matrix)
    assert msgspec.json.decode(text, type=Coverage) == coverage(loaded, loaded.profile_cells("pr"))


def test_a_number_of_missing_pairs_is_a_number(matrix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in ("some", "-1"):
        assert main(["coverage", f"--matrix={matrix}", f"--missing={number}"]) == 4
        assert f"--missing {number}: write a number of pairs, or `all`" in capsys.readouterr().err
