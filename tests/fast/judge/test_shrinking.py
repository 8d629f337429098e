"""Shrinking on oracles that need no run: any conjunction of two features is found exactly, in a few questions."""

import itertools
import math
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.detection.case_judge import the_matrix
from conformance.judge.shrinking import SearchEnded, features_of, shrink, smaller_meshes
from conformance.plan.cells import AxisValue, Cell

MATRIX = the_matrix()
MESHES = MATRIX.content.combined_meshes
COMBINED = [cell for cell in MATRIX.cells.values() if cell.features >= 4 and cell.world_size <= 8]


class Oracle:
    """Law that fails on all cells that have some features, where a cell may be judged."""

    def __init__(self, needed: Mapping[str, AxisValue], scope: Callable[[Cell], bool] = lambda _cell: True) -> None:
        self.needed, self.scope = needed, scope
        self.runs = 0

    def __call__(self, cell: Cell) -> bool | None:
        if MATRIX.content.exclusion_of(cell) or not self.scope(cell):
            return None
        self.runs += 1
        return all(getattr(cell, name) == value for name, value in self.needed.items())


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(COMBINED), st.data())
def test_two_features_are_found_exactly(cell: Cell, data: st.DataObject) -> None:
    features = features_of(cell)
    names = data.draw(st.sampled_from(list(itertools.combinations(features, 2))))
    needed = {name: features[name] for name in names}
    oracle = Oracle(needed)
    smallest = shrink(cell, oracle, meshes=MESHES)
    assert smallest.complete
    assert oracle(smallest.cell)
    assert smallest.features.items() <= needed.items()
    assert needed.items() <= (smallest.features | smallest.required).items()
    for name in smallest.required:  # nothing is left that could be reset
        assert oracle(smallest.cell.but(**{name: Cell().facts()[name]})) is None or name == "mesh"


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([cell for cell in COMBINED if cell.features >= 12]), st.data())
def test_features_that_need_no_others_are_found_by_bisection(cell: Cell, data: st.DataObject) -> None:
    """Each feature takes a bisection and the question whether more is needed; both features are reset at the end."""
    features = {name: value for name, value in features_of(cell).items() if name != "mesh"}
    needed = {name: features[name] for name in data.draw(st.sampled_from(list(itertools.combinations(features, 2))))}
    asked: list[Cell] = []

    def judges_everything(candidate: Cell) -> bool | None:
        if candidate.mesh != cell.mesh:
            return None
        asked.append(candidate)
        return all(getattr(candidate, name) == value for name, value in needed.items())

    assert shrink(cell, judges_everything, meshes=MESHES).features.items() <= (needed | {"mesh": cell.mesh}).items()
    assert len(asked) <= 2 * (math.ceil(math.log2(len(features))) + 1) + 1 + 2


def test_a_good_guess_saves_most_of_the_questions() -> None:
    cell = max(COMBINED, key=lambda cell: (cell.offload == "cpu", cell.tied_embeddings, cell.features))
    oracle = Oracle({"offload": "cpu", "tied_embeddings": True})
    smallest = shrink(cell, oracle, meshes=MESHES, guesses=[Cell(offload="cpu", tied_embeddings=True)])
    assert smallest.cell == Cell(offload="cpu", tied_embeddings=True)
    assert oracle.runs <= 4


def test_guesses_with_other_features_are_not_tried() -> None:
    oracle = Oracle({"offload": "cpu"})
    shrink(Cell(offload="cpu"), oracle, meshes=MESHES, guesses=[Cell(accumulation=2)])
    assert oracle.runs == 1


def test_a_feature_that_needs_another_is_named_alone() -> None:
    cell = Cell(mesh="hsdp2x2", accumulation=2, gradient_sync="last", offload="cpu", tied_embeddings=True)
    smallest = shrink(cell, Oracle({"gradient_sync": "last", "offload": "cpu"}), meshes=MESHES)
    assert smallest.features == {"gradient_sync": "last", "offload": "cpu"}
    assert smallest.required == {"accumulation": 2}
    assert smallest.cell.mesh == "dp2"


def test_features_that_can_only_go_together_are_reset_together() -> None:
    cell = Cell(mesh="tp2", sequence_parallel=False, norms_in_tp=False, init="checkpoint", weights="hf", offload="cpu")
    smallest = shrink(cell, Oracle({"offload": "cpu"}), meshes=MESHES)
    assert smallest.cell == Cell(offload="cpu")


def test_a_mesh_is_a_feature_if_no_smaller_one_fails() -> None:
    cell = Cell(mesh="dp2-tp2", loss_parallel=True, offload="cpu")
    smallest = shrink(cell, lambda cell: cell.mesh == "dp2-tp2" and cell.offload == "cpu", meshes=MESHES)
    assert smallest.features == {"mesh": "dp2-tp2", "offload": "cpu"}


def test_options_that_the_law_needs_are_no_features() -> None:
    cell = Cell(precision="bf16-mp", offload="cpu", accumulation=2)
    oracle = Oracle({"offload": "cpu"}, scope=lambda cell: cell.precision == "bf16-mp")
    smallest = shrink(cell, oracle, meshes=MESHES)
    assert (smallest.features, smallest.required) == ({"offload": "cpu"}, {"precision": "bf16-mp"})


def test_no_feature_is_left_if_the_plain_cell_fails() -> None:
    smallest = shrink(Cell(mesh="dp4", offload="cpu", accumulation=2, seed=3), Oracle({}), meshes=MESHES)
    assert (smallest.cell, smallest.features, smallest.required) == (Cell(seed=3), {}, {})


@pytest.mark.parametrize("questions", range(8))
def test_an_early_end_leaves_a_cell_that_fails(questions: int) -> None:
    oracle = Oracle({"offload": "cpu", "steps": 8})
    cell = Cell(mesh="dp4", offload="cpu", accumulation=2, steps=8, tied_embeddings=True, optimizer="sgd")

    def ends(candidate: Cell) -> bool | None:
        if oracle.runs == questions:
            raise SearchEnded
        return oracle(candidate)

    smallest = shrink(cell, ends, meshes=MESHES)
    assert not smallest.complete
    assert smallest.features.keys() >= {"offload", "steps"}


def test_smaller_meshes_have_the_fewest_ranks_first() -> None:
    assert smaller_meshes("hsdp2x2-tp2", MESHES) == ["dp2", "tp2", "dp2-tp2", "hsdp2x2"]
    assert smaller_meshes("hsdp2x4", MESHES) == ["dp2", "dp3", "dp4", "hsdp2x2"]
    assert smaller_meshes("tp4", MESHES) == ["dp2", "tp2"]
    assert smaller_meshes("dp2", MESHES) == []
    assert smaller_meshes("dp1", MESHES) == []
