"""Blocks on several meshes: the expected gradients are those of autograd, exact, and other for each wrong divisor."""

from types import SimpleNamespace
from typing import Any, cast

import torch

from conformance.sweeps.mesh_blocks import (
    ARRANGEMENTS,
    EXPERTS,
    SPMD,
    Block,
    block_name,
    coefficients_of,
    combinations_of_blocks,
    expected_gradients,
    name_of,
    samples,
)

COORDINATES = [(0, 0), (0, 1), (1, 0), (1, 1)]
MESHES: Any = SimpleNamespace(
    coordinates=lambda: COORDINATES, inner=SimpleNamespace(size=lambda: 2), flat=SimpleNamespace(size=lambda: 4)
)


def test_expected_gradients_are_those_of_autograd() -> None:
    arrangements = (*ARRANGEMENTS, *SPMD)
    expected = expected_gradients(arrangements, MESHES)
    for number, arrangement in enumerate(arrangements):
        block = Block(number)
        for rank, (outer, inner) in enumerate(COORDINATES):
            seen = coefficients_of()
            if arrangement.is_expert:
                own = slice(inner * EXPERTS // 2, (inner + 1) * EXPERTS // 2)
                seen = torch.zeros_like(seen).index_put((torch.arange(EXPERTS)[own],), seen[own])
            (block(samples()[arrangement.sample(rank, outer, inner)], seen, seen) / 4).backward()
        for name, parameter in block.named_parameters():
            assert torch.equal(cast("torch.Tensor", parameter.grad), expected[f"blocks.{number}.{name}"]), (
                arrangement.name
            )


def test_expected_gradients_are_exact_and_not_zero() -> None:
    for grad in expected_gradients((*ARRANGEMENTS, *SPMD), MESHES).values():
        assert grad.any()
        assert torch.equal(4 * grad, (4 * grad).round())


def test_any_two_arrangements_meet_and_all_and_those_of_one_call() -> None:
    models = combinations_of_blocks()
    assert models[-2:] == [ARRANGEMENTS, SPMD]
    assert len(models) == len(ARRANGEMENTS) * (len(ARRANGEMENTS) - 1) // 2 + 2
    assert len({name_of(arrangements) for arrangements in models}) == len(models)
    assert block_name("blocks.1.weight", ARRANGEMENTS) == ARRANGEMENTS[1].name
    assert block_name("shift/exp_avg", ARRANGEMENTS) == "root"
