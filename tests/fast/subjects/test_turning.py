"""Elements whose steps turn in bf16: small tensors have whole ones, large tensors a share."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.subjects import classification, subject
from conformance.subjects.evidence import BF16_FACTOR
from conformance.subjects.facts import OwnErrors
from conformance.subjects.reference import Trajectory
from conformance.subjects.turning import allowed_turns, allowing_turns, distances_if_turned

STEP = 1e-3
"""Length of each element's step."""
EXACT = {"bias": torch.full((16,), STEP), "weight": torch.full((40, 100), STEP)}
ORIGIN = {name: torch.zeros_like(tensor) for name, tensor in EXACT.items()}
TURNED = {name: torch.full_like(tensor, 2 * STEP) for name, tensor in EXACT.items()}
STEADY = OwnErrors(dict.fromkeys(EXACT, 1e-6), 1e-6)
IN_BF16 = OwnErrors(dict.fromkeys(EXACT, 0.01), 0.1)


def with_turns(count: int) -> dict[str, Tensor]:
    run = {name: tensor.clone() for name, tensor in EXACT.items()}
    run["weight"].view(-1)[:count] *= -1
    return run


def bound_of(name: str, *, turns: int, turned: dict[str, Tensor] = TURNED, in_fp32: OwnErrors = STEADY) -> float:
    errors = allowing_turns(IN_BF16, turned, [with_turns(turns)], EXACT, ORIGIN, in_fp32)
    return BF16_FACTOR * errors.by_name[name]


def test_a_small_tensor_may_have_an_element_that_turns_and_not_a_fourth_of_all() -> None:
    assert 2 / 4 < bound_of("bias", turns=14) < 2 * (4 / 16) ** 0.5  # one of 16, and four of 16
    assert bound_of("bias", turns=0) == pytest.approx(BF16_FACTOR * 0.01)


def test_a_large_tensor_may_turn_little_more_than_its_share() -> None:
    assert 2 * (28 / 4000) ** 0.5 < bound_of("weight", turns=14) < 2 * (60 / 4000) ** 0.5


def test_steps_that_are_noise_or_linear_in_gradients_get_no_room() -> None:
    in_fp32 = OwnErrors({"bias": 0.5, "weight": 1e-6}, 1e-6)
    assert bound_of("bias", turns=14, in_fp32=in_fp32) == pytest.approx(BF16_FACTOR * 0.01)
    linear = {name: tensor.clone() for name, tensor in TURNED.items()}
    linear["bias"][:8] = 1e-9  # of small gradients, whose steps are small and turn first
    assert bound_of("bias", turns=14, turned=linear) == pytest.approx(BF16_FACTOR * 0.01)


@pytest.mark.parametrize(("mean", "allowed"), [(0.0, 0), (1e-5, 0), (0.11, 3), (28.0, 50), (7000.0, 7313)])
def test_the_number_of_turns_is_exceeded_once_in_ten_thousand(mean: float, allowed: int) -> None:
    assert allowed_turns(mean) == allowed
    samples = torch.poisson(torch.full((1_000_000,), mean), generator=torch.Generator().manual_seed(0))
    assert int((samples > allowed).sum()) <= 140  # 100 are expected at most, with a deviation of 10


@pytest.mark.parametrize(
    ("optimizer", "is_constant"), [(torch.optim.AdamW, True), (torch.optim.SGD, False)], ids=["adam", "sgd"]
)
def test_a_turned_element_is_off_by_two_steps(optimizer: Any, is_constant: bool) -> None:
    trainer = subject(
        model=lambda: nn.Linear(4, 3), optimizer=lambda ps: optimizer(ps, lr=STEP), **classification((4,), 3)
    )(lambda model, mesh, config: model)
    gradient = torch.tensor([0.5, -0.25, 0.125])
    exact = Trajectory(initial={"bias": torch.zeros(3)}, gradients=[{"bias": gradient.double()}], norms=[1.0])
    distances = distances_if_turned(trainer, exact, max_norm=0.0)["bias"]
    assert torch.allclose(distances, 2 * STEP * (torch.ones(3) if is_constant else gradient.abs()), rtol=1e-4)
