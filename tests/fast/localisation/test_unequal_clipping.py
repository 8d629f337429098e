"""Ways of clipping that treat parameters unequally."""

from collections.abc import Collection, Mapping

import pytest
import torch
from torch import Tensor

from conformance.localisation.unequal_clipping import partial_norms, unequal_factors
from conformance.oracles.reference import clip_factor, total_norm

LIMIT = 2.0
GRADIENTS = {
    "encoder.weight": torch.full((4, 4), 1.0),
    "encoder.bias": torch.tensor([0.0, 3.0]),
    "head.weight": torch.full((3, 4), 2.0),
    "head.bias": torch.full((4,), 0.5),
    "unused": torch.zeros(3),
}
ALL = total_norm(GRADIENTS.values(), order=2.0)


def norm_of(*names: str) -> float:
    return total_norm([GRADIENTS[name] for name in names], order=2.0)


def scaled(factors: Mapping[str, float]) -> dict[str, Tensor]:
    """Return the gradients, each multiplied by the factor of its module, 1 if it has none."""
    return {
        name: each * factors.get(name, factors.get(name.partition(".")[0], 1.0)) for name, each in GRADIENTS.items()
    }


ENCODER, HEAD = (
    clip_factor(norm_of(*(name for name in GRADIENTS if name.startswith(module))), max_norm=LIMIT)
    for module in ("encoder", "head")
)


@pytest.mark.parametrize(
    ("factors", "id_", "words"),
    [
        ({"encoder": ENCODER, "head": HEAD}, "norms-of-parts", ["encoder (5)", "head (7)", "(8.602)"]),
        (
            {name: clip_factor(norm_of(name), max_norm=LIMIT) for name in GRADIENTS},
            "norms-of-parts",
            ["encoder.weight (4), encoder.bias (3), head.weight (6.928) and 1 more"],
        ),
        ({"head": HEAD}, "left-out-of-clipping", ["gradients of encoder.weight and 1 more are left out of clipping"]),
        (
            {"head": clip_factor(ALL, max_norm=LIMIT)},
            "not-all-scaled",
            ["gradients of encoder.weight and 1 more are not clipped: they are in the norm"],
        ),
    ],
)
def test_parts_that_are_scaled_unequally_are_named(
    factors: Mapping[str, float], id_: str, words: Collection[str]
) -> None:
    ((found, sentence),) = unequal_factors(GRADIENTS, scaled(factors), limit=LIMIT)
    assert found == id_
    assert all(each in sentence for each in words), sentence


@pytest.mark.parametrize("factors", [{"encoder": 0.5, "head": 0.5}, {"encoder": 0.5, "head": 0.7}, {"encoder": 0.5}])
def test_factors_of_no_norm_are_not_named(factors: Mapping[str, float]) -> None:
    assert not list(unequal_factors(GRADIENTS, scaled(factors), limit=LIMIT))


def test_elements_that_are_scaled_unequally_are_not_named() -> None:
    after = scaled({"encoder": ENCODER, "head": HEAD})
    after["head.weight"][0] *= 2.0
    assert not list(unequal_factors(GRADIENTS, after, limit=LIMIT))


def test_a_part_that_is_left_out_may_have_a_norm_of_its_own_below_the_limit() -> None:
    before = GRADIENTS | {"encoder.weight": torch.zeros(4, 4), "encoder.bias": torch.tensor([0.0, 1.0])}
    after = before | {name: each * HEAD for name, each in GRADIENTS.items() if name.startswith("head")}
    ((_, sentence),) = unequal_factors(before, after, limit=LIMIT)
    assert sentence.startswith("gradients of encoder.bias are left out of clipping")
    assert sentence.endswith("or by a norm of their own, which is below the limit (1)")


def test_norms_that_lack_a_module_are_named() -> None:
    found = {(id_, round(norm, 4)): sentence for id_, sentence, norm in partial_norms(GRADIENTS)}
    assert "lacks those of head" in found["norm-without-a-part", 5.0]
    assert "those of head alone (7)" in found["norm-of-a-part", 7.0]
