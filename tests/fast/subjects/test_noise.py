"""Optimizers whose steps jump: runs with noise on gradients, and the own errors that these raise."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.optim import SGD, Optimizer

from conformance.subjects import subject
from conformance.subjects.cells import Workload
from conformance.subjects.evidence import FP32_FACTOR
from conformance.subjects.facts import OwnErrors
from conformance.subjects.noise import GradientNoise, raised, runs_with_noise
from conformance.subjects.objectives import classification
from conformance.subjects.reference import Trajectory, own_errors, train
from tests.support.subject_models import declare, shard

WORKLOAD = Workload(tied=False, data_ranks=2, accumulation=(1, 1), uneven=False)


class SignOfGradient(Optimizer):
    """Step of one size in each element."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.add_(p.grad.sign(), alpha=-0.01)


def errors(exact: Trajectory, relative: float) -> list[OwnErrors]:
    return [OwnErrors(dict.fromkeys(each, relative), relative) for each in exact.gradients]


@pytest.mark.parametrize(("optimizer", "runs"), [(SignOfGradient, 4), (lambda p: SGD(p, lr=0.1, momentum=0.9), 0)])
def test_noise_is_tried_where_steps_jump(optimizer: Callable[..., Optimizer], runs: int) -> None:
    trainer = declare(optimizer=optimizer)(shard)
    exact = train(trainer, WORKLOAD, dtype=torch.float64, order=0, max_norm=None)
    noisy = runs_with_noise(trainer, WORKLOAD, exact, errors(exact, 1e-3), max_norm=1.0, splits_sums=True)
    assert len(noisy) == runs
    for run in noisy:  # a gradient is told before its noise is added
        assert torch.allclose(run.gradients[0]["up.weight"].double(), exact.gradients[0]["up.weight"], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_more_accurate_run_stays_as_it_was(dtype: torch.dtype) -> None:
    """A reference is in fp32 if its model cannot compute in fp64; a step that is tried must not change its weights."""
    trainer = declare(optimizer=SignOfGradient)(shard)
    exact = train(trainer, WORKLOAD, dtype=dtype, order=0, max_norm=None)
    before = {name: tensor.clone() for name, tensor in exact.initial.items()}
    runs_with_noise(trainer, WORKLOAD, exact, errors(exact, 1e-3), max_norm=1.0, splits_sums=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in exact.initial.items())


class Quantised(nn.Linear):
    """Layer whose weights have few values, with a straight-through gradient."""

    def forward(self, x: Tensor) -> Tensor:
        rounded = (self.weight * 16).round() / 16
        return linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


class InFewBits(nn.Linear):
    """Layer whose inputs are rounded to bf16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.bfloat16).to(x.dtype))


@pytest.mark.parametrize(("layer", "is_off"), [(Quantised, True), (InFewBits, True), (nn.Linear, False)])
def test_noise_is_tried_where_a_model_rounds(layer: type[nn.Linear], is_off: bool) -> None:
    trainer = subject(model=lambda: nn.Sequential(layer(6, 8), nn.Tanh(), nn.Linear(8, 3)), **classification((6,), 3))(
        lambda model, mesh, config: model
    )
    exact = train(trainer, WORKLOAD, dtype=torch.float64, order=0, max_norm=None)
    noisy = runs_with_noise(trainer, WORKLOAD, exact, errors(exact, 1e-7), max_norm=1.0, splits_sums=True)
    assert len(noisy) == (4 if is_off else 0)
    assert not runs_with_noise(trainer, WORKLOAD, exact, errors(exact, 1e-7), max_norm=1.0, splits_sums=False)
    for run in noisy:
        assert torch.equal(run.initial["0.weight"], exact.initial["0.weight"].float())
        assert 0 < float((run.gradients[0]["2.weight"] - exact.gradients[0]["2.weight"]).norm()) < 1e-2


def test_noise_has_the_size_of_the_bound_and_two_signs() -> None:
    gradient = {"weight": torch.full((64, 64), 2.0)}
    noises = [GradientNoise([OwnErrors({"weight": 1e-4}, 0.0)], 0, sign).in_step(0, gradient) for sign in (1.0, -1.0)]
    assert torch.equal(noises[0]["weight"], -noises[1]["weight"])
    relative = float(noises[0]["weight"].norm() / gradient["weight"].norm())
    assert relative == pytest.approx(FP32_FACTOR * 1e-4, rel=0.05)


def test_errors_with_noise_are_not_multiplied_again() -> None:
    (one,) = raised([OwnErrors({"a": 1.0, "b": 1.0}, 1.0)], [OwnErrors({"a": 4.0, "b": 80.0}, 8.0)])
    assert one == OwnErrors({"a": 1.0, "b": 10.0}, 1.0)


def test_changes_that_are_noise_do_not_raise_the_bound_of_others() -> None:
    exact = {"weight": torch.ones(8, dtype=torch.float64), "bias": torch.full((8,), 1e-9, dtype=torch.float64)}
    run = {"weight": torch.full((8,), 1.0 + 1e-6), "bias": torch.full((8,), 0.5)}
    changes = own_errors([run], exact, {name: torch.zeros(8) for name in exact})
    assert changes.by_name["bias"] > 1e6
    assert changes.overall == pytest.approx(1e-6, rel=0.1)
    assert own_errors([run], exact, None).overall > 0.1  # by which a random model is told


def test_in_bf16_deviations_that_are_usual_there_count() -> None:
    origin = {"steady": torch.zeros(4), "noise": torch.zeros(4)}
    exact = {"steady": torch.ones(4), "noise": torch.ones(4)}
    run = {"steady": torch.tensor([1.0, 1.0, 1.0, -1.0]), "noise": -torch.ones(4)}
    in_fp32 = OwnErrors({"steady": 1e-6, "noise": 1.0}, 1e-6)
    assert own_errors([run], exact, origin, in_fp32=in_fp32).overall == pytest.approx(1.0)
