"""Tree of modules beside a first wrong place: neighbours in the same state are one row, the wrong one has its label."""

import pytest
from expecttest import assert_expected_inline

from conformance.report.location import Location, Mark
from conformance.report.module_tree import branches, tree_lines
from tests.support.sample_reports import location, model_tree

CASE = "PAR-1/tp2-fp32-default-meta"


def text(shown: Location) -> str:
    return "\n".join(tree_lines(shown)) + "\n"


def test_a_model_of_eighty_layers_is_short() -> None:
    assert_expected_inline(
        text(location(CASE, tree=model_tree(layers=80))),
        """\
model: follows
  tok_embeddings: follows
  layers.0: follows (besides unseen 1)
  layers.1: follows
    norm: follows
    attention: follows
      wq, wk, wv: follows
      dropout: unseen
      wo: wrong, gradient of its input (backward)
    feed_forward: right
  layers.2 ... layers.79: right (besides unseen 78)
  norm, output: right
""",
    )


def test_all_modules_are_counted_and_those_of_neighbours_once_shown() -> None:
    tree = model_tree(layers=80)
    (model,) = branches(location(CASE, tree=tree))
    assert sum(model.counts.values()) == len(tree) - 1, "without the container `layers`"
    neighbours = next(branch for branch in model.below if len(branch.names) == 78)
    assert [branch.name for branch in neighbours.below] == ["norm", "attention", "feed_forward"]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("layers.1.attention.wo.weight", "\n      wo: wrong, weight, gradient (reduction)\n"),
        ("layers.0", "\n  layers.0: follows, gradient (reduction) (besides unseen 1)\n"),
        ("layers", "\n  layers: unseen, gradient (reduction)\n    0: follows (besides unseen 1)\n    1: follows\n"),
        ("", "\nmodel: follows, gradient (reduction)\n"),
    ],
)
def test_the_wrong_place_is_that_of_a_module_or_of_the_module_that_has_the_parameter(name: str, label: str) -> None:
    shown = location(CASE, name=name, quantity="gradient", stage="reduction")
    assert label in f"\n{text(shown)}"


def test_modules_without_a_root_or_in_one_state_alone() -> None:
    tree: dict[str, Mark] = {"a.b": "right", "a.c": "wrong", "d": "right", "e": "right", "f.g": "unseen"}
    assert_expected_inline(
        text(location(CASE, name="a.c", tree=tree)),
        """\
a.b: right
a.c: wrong, gradient of its input (backward)
d, e: right
f: unseen
""",
    )
    assert text(location(CASE, name="", tree={"": "right", "a": "right", "b": "right"})) == (
        "model: right, gradient of its input (backward)\n"
    )
    assert text(location(CASE, name="", tree={"a": "unseen"})) == "model: unseen, gradient of its input (backward)\n"
    assert branches(location(CASE, tree={})) == []
