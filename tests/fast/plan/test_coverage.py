"""Coverage of a matrix: combinations counted by another program, and cells that laws leave out."""

import itertools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.detection.case_judge import the_matrix
from conformance.plan.cells import AxisValue, Cell, axis_default, cell_from_axes
from conformance.plan.content import Content, Exclusion, Profile, Section
from conformance.plan.coverage import (
    CombinationCoverage,
    LawCoverage,
    LeftOut,
    Tally,
    coverage,
    covered,
    impossible_pairs,
    laws_on,
    on_numbers,
)
from conformance.plan.matrix import Matrix
from conformance.plan.scopes import GAPS, Gap
from tests.support.matrices import written_matrix

TEXT = """\
schema: 2
axes:
  mesh: [dp2, tp2]
  clip: [1, 0, 0.1]
  compile: [false, true]
  dropout: [0.0, 0.1]
alone:
  seed: [1]
cells:
  plain:
    note: why
    axes: {mesh: [dp2, tp2], clip: [1.0, 0.1]}
  more:
    note: why
    axes: {compile: [true], dropout: [0.1]}
exclusions:
  - {when: mesh = tp2 and compile = true, reason: torch refuses it, reference: torch/x.py}
profiles:
  all: {note: why, must: [plain, more], deadline_s: 60}
  plain: {note: why, must: [plain], deadline_s: 60}
"""
LAWS = """\
@law("NUM-1", where="compile = false", gaps=["clipped-tp"], numbers=True)
def test_a(): ...
@law("NUM-2", where="compile = true", numbers=True)
def test_b(): ...
@law("ANY-1", where="world > 1")
def test_c(): ...
@law("ANY-2", where="world > 8")
def test_d(): ...
"""
Axes = dict[str, list[AxisValue]]
CLIPPED_TP = Gap("mesh = tp2 and clip = 0.1", "nobody knows")


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Matrix:
    """Cells dp2, dp2 clipped, tp2, tp2 clipped, and dp2 compiled with dropout; NUM-1 leaves the fourth out."""
    monkeypatch.setitem(GAPS, "clipped-tp", CLIPPED_TP)
    (tmp_path / "test_laws.py").write_text(LAWS)
    return written_matrix(tmp_path / "matrix.yaml", TEXT, laws_directory=tmp_path)


def test_pairs_and_triples_are_those_counted_by_hand(matrix: Matrix) -> None:
    found = coverage(matrix, matrix.profile_cells("all"))
    assert found.pairs == CombinationCoverage(
        values=Tally(17, 29),
        features=Tally(1, 8),
        axes={"mesh": Tally(9, 13), "clip": Tally(9, 18), "compile": Tally(8, 13), "dropout": Tally(8, 14)},
    )
    assert (found.triples.values, found.triples.features) == (Tally(14, 39), Tally(0, 4))
    assert coverage(matrix, matrix.profile_cells("plain")).pairs.values == Tally(12, 29)
    assert Tally(0, 0).share == 1.0


def test_laws_count_the_cells_that_they_leave_out(matrix: Matrix) -> None:
    gap = LeftOut(where=CLIPPED_TP.cells, reason=CLIPPED_TP.reason, cells=1)
    assert coverage(matrix, matrix.profile_cells("all")).laws == {
        "ANY-1": LawCoverage(pairs=None, cells=5, judged=5, left_out=[]),
        "NUM-1": LawCoverage(pairs=12, cells=4, judged=3, left_out=[gap]),
        "NUM-2": LawCoverage(pairs=6, cells=1, judged=1, left_out=[]),
    }


def test_pairs_that_are_not_judged_are_not_seen(matrix: Matrix) -> None:
    cells = matrix.profile_cells("all")
    judged = {("NUM-1", Cell().id), ("NUM-2", Cell().id), ("ANY-1", Cell(mesh="tp2").id)}
    found = coverage(matrix, cells, judged=judged)
    assert found.pairs.values == Tally(6, 29)
    assert {law: (each.judged, each.pending) for law, each in found.laws.items()} == {
        "ANY-1": (1, 4),
        "NUM-1": (1, 2),
        "NUM-2": (0, 1),
    }
    assert coverage(matrix, cells, judged=set()).pairs.values == Tally(0, 29)


def test_a_missing_pair_can_be_on_a_cell_without_a_law_on_numbers(matrix: Matrix) -> None:
    cells = matrix.profile_cells("all")
    seen_on = on_numbers(matrix, laws_on(matrix, cells))
    missing = covered(matrix.content, seen_on, 2).missing
    assert len(missing) == 12
    assert {"mesh": "tp2", "clip": 0.1} in missing
    assert {"mesh": "tp2", "compile": True} not in missing, "impossible"


def content(axes: Axes, *when: str) -> Content:
    rules = [Exclusion(when=text, reason=f"reason of {text}", reference="x") for text in when]
    profiles = {"all": Profile(note="why", deadline_s=1)}
    return Content(
        schema=2, axes=axes, cells={"a": Section(note="why", axes=axes)}, exclusions=rules, profiles=profiles
    )


def test_impossible_pairs_name_the_exclusions_that_make_them_so() -> None:
    axes: Axes = {
        "mesh": ["dp2", "tp2", "dp3"],
        "compile": [False, True],
        "dropout": [0.0, 0.1],
        "offload": ["none", "cpu"],
    }
    one, two, three = "mesh = dp2 and compile = true", "mesh = tp2 and dropout = 0.1", "mesh = dp3 and dropout = 0.1"
    four = "mesh = tp2 and offload = cpu and compile = true"
    five = "mesh = dp3 and offload = cpu"
    found = impossible_pairs(content(axes, one, two, three, four, five))
    assert impossible_pairs(content(axes)) == []
    *_, together = impossible_pairs(content({**axes, "mesh": ["dp2", "tp2"], "offload": ["none"]}, one, two))
    assert [rule.when for rule in together.exclusions] == [one, two]
    assert list(together.pairs) == [{"compile": True, "dropout": 0.1}]
    by_rules = {tuple(rule.when for rule in each.exclusions): list(each.pairs) for each in found}
    assert by_rules == {
        (one,): [{"mesh": "dp2", "compile": True}],
        (two,): [{"mesh": "tp2", "dropout": 0.1}],
        (three,): [{"mesh": "dp3", "dropout": 0.1}],
        (five,): [{"mesh": "dp3", "offload": "cpu"}],
        (): [{"compile": True, "dropout": 0.1}, {"compile": True, "offload": "cpu"}],
    }


AXES: Axes = {
    "mesh": ["dp2", "tp2", "hsdp2x2"],
    "clip": [1.0, 0.0],
    "compile": [False, True],
    "accumulation": [1, 2, 4],
}
RULES = (
    "tp = 2 and compile = true",
    "world = 4 and accumulation = 1",
    "clip = 0 and compile = true and accumulation = 2",
)


def combinations(cells: Iterable[Cell], strength: int) -> Iterator[tuple[tuple[str, AxisValue], ...]]:
    for cell in cells:
        yield from itertools.combinations([(axis, getattr(cell, axis)) for axis in AXES], strength)


@settings(max_examples=25, deadline=None)
@given(st.sets(st.sampled_from(RULES)), st.sets(st.integers(0, 35)), st.sampled_from([2, 3]))
def test_counts_are_those_of_all_combinations_of_all_cells(rules: set[str], picked: set[int], strength: int) -> None:
    """Here all cells can be listed, unlike those of the project."""
    described = content(AXES, *sorted(rules))
    every = [cell_from_axes(dict(zip(AXES, values, strict=True))) for values in itertools.product(*AXES.values())]
    allowed = [cell for cell in every if described.exclusion_of(cell) is None]
    chosen = [cell for number, cell in enumerate(every) if number in picked and cell in allowed]
    cells = [*chosen, Cell(mesh="dp8", compile=True), Cell(mesh="tp2", compile=True, clip=7.0)]
    possible = set(combinations(allowed, strength))
    seen = set(combinations(cells, strength)) & possible
    found = covered(described, cells, strength)

    def tally(wanted: frozenset[str], *, features: bool = False) -> Tally:
        def counts(combination: tuple[tuple[str, AxisValue], ...]) -> bool:
            is_with = wanted <= {axis for axis, _ in combination}
            return is_with and not (features and any(value == axis_default(axis) for axis, value in combination))

        return Tally(*(sum(map(counts, each)) for each in (seen, possible)))

    assert found.counts() == CombinationCoverage(
        values=tally(frozenset()),
        features=tally(frozenset(), features=True),
        axes={axis: tally(frozenset({axis})) for axis in AXES},
    )
    assert {tuple(sorted(pair.items())) for pair in found.missing} == {tuple(sorted(c)) for c in possible - seen}


def test_the_cells_of_pr_have_all_pairs() -> None:
    matrix = the_matrix()
    start_s = time.process_time()
    cells = matrix.profile_cells("pr")
    missing = covered(matrix.content, on_numbers(matrix, laws_on(matrix, cells)), 2).missing
    assert not missing
    assert time.process_time() - start_s < 3.0
    excluded = impossible_pairs(matrix.content)
    assert all(each.exclusions for each in excluded), "each impossible pair has a reason"
