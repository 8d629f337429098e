"""Coverage of a session: its cases, tables, and falls between two reports."""

import pytest
from msgspec.structs import replace

from conformance.judge.verdicts import Verdict
from conformance.plan.coverage import Coverage, Tally
from conformance.plan.matrix import TRAINERS, Matrix
from conformance.report.coverage import axis_rows, coverage_line, law_rows, session_coverage, total_rows
from conformance.report.diff import as_markdown, as_text, diff
from conformance.report.html import html_report
from conformance.report.schema import CaseResult
from tests.support.matrices import written_matrix
from tests.support.sample_reports import COVERAGE, case, deviation, report

TEXT = """\
schema: 2
axes: {mesh: [dp2, tp2], compile: [false, true]}
alone: {seed: [1]}
cells:
  every: {note: why, axes: {mesh: [dp2, tp2], compile: [false, true]}}
profiles:
  all: {note: why, must: all, deadline_s: 60}
  small: {note: why, must: all, cells: mesh = dp2, deadline_s: 60}
"""
LAWS = """\
@law("NUM-1", where="world > 1", numbers=True)
def test_a(): ...
@law("ANY-1", where="compile = true")
def test_b(): ...
"""
ON_NUMBERS = "NUM-1/dp2-fp32-default-meta"


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("matrix")
    (folder / "test_laws.py").write_text(LAWS)
    return written_matrix(folder / "matrix.yaml", TEXT, laws_directory=folder)


def judged(matrix: Matrix, *cases: CaseResult, seed: int = 0) -> tuple[int, dict[str, int]]:
    """Return the seen pairs of the four possible ones, and the number of cells that each law has judged."""
    found = session_coverage(matrix, "all", cases, seed=seed)
    assert (found.pairs.values.possible, found.laws["NUM-1"].cells, found.laws["ANY-1"].cells) == (4, 4, 2)
    return found.pairs.values.seen, {law: each.judged for law, each in found.laws.items() if each.judged}


@pytest.mark.parametrize("verdict", list(Verdict))
def test_verdicts_that_judge(matrix: Matrix, verdict: Verdict) -> None:
    counts = verdict in ("pass", "quality-warning", "waived", "fail", "unexpected-pass")
    found = judged(matrix, case(ON_NUMBERS, verdict, loss=deviation(1e-6)))
    assert found == ((1, {"NUM-1": 1}) if counts else (0, {}))


def test_a_session_about_another_trainer_counts_no_combinations(matrix: Matrix) -> None:
    found = session_coverage(matrix, TRAINERS, [case("loss/other/dp2-fp32-default-full")])
    assert (found.pairs.values, found.triples.features, found.laws) == (Tally(0, 0), Tally(0, 0), {})


def test_cases_that_do_not_count(matrix: Matrix) -> None:
    """A law on numbers has judged nothing if it has measured nothing; other cells and laws are not of the profile."""
    assert judged(matrix, case(ON_NUMBERS, "fail")) == (0, {})
    assert judged(matrix, case("ANY-1/dp2-fp32-default-meta-compile", "fail")) == (0, {"ANY-1": 1})
    names = ("NUM-1/dp4-fp32-default-meta", "NUM-2/dp2-fp32-default-meta", "?/?", "ANY-1/dp2-fp32-default-meta")
    assert judged(matrix, *(case(name, loss=deviation(1e-6)) for name in names)) == (0, {})


def test_cells_with_another_seed_are_those_of_the_profile(matrix: Matrix) -> None:
    cells = matrix.cases("all", seed=3)
    cases = [case(each.id, loss=deviation(1e-6)) for each in cells]
    assert judged(matrix, *cases, seed=3) == (4, {"ANY-1": 2, "NUM-1": 4})
    assert judged(matrix, *cases, seed=2) == (0, {})


def test_cells_beyond_the_profile_count_once_they_are_judged(matrix: Matrix) -> None:
    """`--budget` can be larger than that of the profile."""
    cases = [case(f"NUM-1/{mesh}-fp32-default-meta", loss=deviation(1e-6)) for mesh in ("dp2", "tp2")]
    small, more = (session_coverage(matrix, "small", cases[:number]) for number in (1, 2))
    assert [(each.laws["NUM-1"].judged, each.laws["NUM-1"].cells) for each in (small, more)] == [(1, 2), (2, 3)]
    assert (small.pairs.values, more.pairs.values) == (Tally(1, 4), Tally(2, 4))


def test_tables() -> None:
    assert total_rows(COVERAGE)[:2] == [
        ["pairs of any values", "90 %", "9", "10"],
        ["pairs of non-default values", "25 %", "1", "4"],
    ]
    assert axis_rows(COVERAGE) == [
        ["clip", "62.5 %", "5", "8", "62.5 %", "5", "8"],
        ["mesh", "100 %", "4", "4", "-", "0", "0"],
    ], "the worst axis comes first, and shares are rounded down"
    assert coverage_line(COVERAGE) == "coverage by laws on numbers: pairs 90 % of 10, triples 99.9 % of 3000"
    nothing = replace(COVERAGE, triples=replace(COVERAGE.triples, values=Tally(0, 0)))
    assert coverage_line(nothing).endswith("triples none possible")
    html = html_report(report(case("PAR-1/a")))
    told = ("62.5 %", "99.9 %", "no &lt;oracle&gt;", "dropout &gt; 0.0", "pairs of non-default values", "#coverage")
    assert all(text in html for text in told)
    assert law_rows(COVERAGE) == [
        ["PAR-1", "9", "7", "4", "57.1 %", "2", "dropout > 0.0", "no <oracle>"],
        ["", "", "", "", "", "1", "", "unsupported, not selected, or without a result"],
        ["MEM-1", "", "3", "3", "100 %", "", "", ""],
    ]


def changed(*, laws: dict[str, int] | None = None, **tallies: Tally) -> Coverage:
    """Return a coverage with other pairs or triples of any values, or other fields of the law PAR-1."""
    combinations = {name: replace(getattr(COVERAGE, name), values=tally) for name, tally in tallies.items()}
    par_1 = replace(COVERAGE.laws["PAR-1"], **(laws or {}))
    return replace(COVERAGE, **combinations, laws=COVERAGE.laws | {"PAR-1": par_1})


@pytest.mark.parametrize(
    ("after", "fallen"),
    [
        (COVERAGE, None),
        (changed(pairs=Tally(8, 10)), ("pairs", "9 of 10, 90 %", "8 of 10, 80 %")),
        (changed(pairs=Tally(9, 11)), ("pairs", "9 of 10, 90 %", "9 of 11, 81.8 %")),
        (changed(pairs=Tally(8, 8)), ("pairs", "9 of 10, 90 %", "8 of 8, 100 %")),
        (changed(pairs=Tally(10, 10)), None),
        (changed(triples=Tally(0, 3000)), ("triples", "2999 of 3000, 99.9 %", "0 of 3000, 0 %")),
        (changed(laws={"judged": 3}), ("PAR-1", "4 of 7, 57.1 %", "3 of 7, 42.8 %")),
        (changed(laws={"judged": 3, "cells": 3}), ("PAR-1", "4 of 7, 57.1 %", "3 of 3, 100 %")),
        (changed(laws={"judged": 5, "cells": 20}), None),
        (replace(COVERAGE, laws={"PAR-1": COVERAGE.laws["PAR-1"]}), ("MEM-1", "3 of 3, 100 %", "0 of 0, -")),
    ],
)
def test_a_fall_is_a_warning(after: Coverage, fallen: tuple[str, str, str] | None) -> None:
    difference = diff(report(), report(coverage=after))
    assert [(each.kind, each.case, each.before, each.after) for each in difference.changes] == (
        [("coverage-fell", *fallen)] if fallen else []
    )
    assert difference.exit_status == 0
    for text in (as_text(difference), as_markdown(difference)):
        assert ("coverage-fell" in text) == bool(fallen)
        assert all(told in text for told in fallen or ["no difference"])
