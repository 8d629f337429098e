"""Documented algorithms of optimizers, computed by hand."""

from typing import Any

import numpy as np
import pytest

from conformance.oracles.documented_optimizers import documented_steps

EPS = 2.0**-40
"""More than the rounding of a few operations, less than any term of an algorithm that is left out."""


@pytest.mark.parametrize(
    ("optimizer", "options", "expected"),
    [
        # b = 2, then 0.5 * 2 + 0.75 * 2; each with 0.25 of the parameter as decay would differ.
        ("SGD", {"momentum": 0.5, "dampening": 0.25}, 1 - 0.125 * 2 - 0.125 * 2.5),
        ("SGD", {"momentum": 0.5, "nesterov": True}, 1 - 0.125 * (2 + 0.5 * 2) - 0.125 * (2 + 0.5 * 3)),
        ("SGD", {"maximize": True, "foreach": True}, 1 + 2 * 0.125 * 2),
        # Equal gradients have corrected moments of 2 and 4 in each step.
        ("Adam", {"eps": 0.0, "weight_decay": 0.0}, 1 - 2 * 0.125),
        ("Adam", {"eps": 2.0}, 1 - 2 * 0.125 * 2 / 4),
        ("AdamW", {"eps": 0.0, "weight_decay": 0.5}, ((1 - 0.0625) - 0.125) * (1 - 0.0625) - 0.125),
        ("Adamax", {"eps": 2.0, "betas": (0.5, 1.0)}, 1 - 2 * 0.125 * 2 / 4),
        ("Adagrad", {"eps": 0.0, "lr_decay": 1.0}, 1 - 0.125 - 0.0625 * 2 / 8**0.5),
        ("RMSprop", {"eps": 0.0, "alpha": 0.0}, 1 - 2 * 0.125),
        ("Rprop", {"etas": (0.5, 4.0), "step_sizes": (0.0, 0.25)}, 1 - 0.125 - 0.25),
        ("ASGD", {"lambd": 0.0}, 1 - 2 * 0.125 * 2),
        ("RAdam", {}, 1 - 2 * 0.125 * 2),  # not rectified before the sixth step
    ],
)
def test_steps_are_those_of_the_documentation(optimizer: str, options: dict[str, Any], expected: float) -> None:
    stepped = documented_steps(optimizer, np.ones(1), [np.full(1, 2.0)] * 2, {"lr": 0.125, **options})
    assert stepped is not None
    assert abs(stepped.item() - expected) < EPS


@pytest.mark.parametrize(("optimizer", "options"), [("LBFGS", {}), ("Adam", {"lr": 0.125, "momentum": 0.5})])
def test_there_are_no_steps_without_an_algorithm_of_the_optimizer_and_of_each_option(
    optimizer: str, options: dict[str, Any]
) -> None:
    assert documented_steps(optimizer, np.ones(1), [np.ones(1)], options) is None
