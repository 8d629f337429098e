"""`python -m conformance coverage`: tables of a small matrix, judged by the laws of the suite."""

import re
from pathlib import Path

import msgspec
import pytest

from conformance.__main__ import main
from conformance.plan.coverage import Coverage, coverage
from conformance.plan.matrix import load_matrix
from tests.support.matrices import write_matrix

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--profile=px"], "unknown profile `px`; allowed: pr"),
        (["--missing=some"], "--missing some: write a number of pairs, or `all`"),
        (["--missing=-1"], "--missing -1: write a number of pairs, or `all`"),
        (["--matrix=/none.yaml"], "/none.yaml"),
    ],
)
def test_mistakes(matrix: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["coverage", f"--matrix={matrix}", *options]) == 4
    assert message in capsys.readouterr().err
