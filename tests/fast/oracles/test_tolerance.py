"""Tolerances on cases small enough for another computation."""

import functools
import itertools
import operator
from collections.abc import Iterable, Mapping
from math import inf, sqrt
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from conformance.assertions import compare
from conformance.bound import EXACT, Bound, bound
from conformance.oracles import optimizer_tolerance, tolerance
from conformance.oracles.emulation import Emulation, Reduction
from conformance.oracles.reference import ReferenceRun, total_norm
from conformance.plan.cells import Cell
from reference_trainer.config import OptimizerConfig


def values(bounds: Mapping[str, Any]) -> dict[str, Any]:
    return {name: bound.value if isinstance(bound, Bound) else values(bound) for name, bound in bounds.items()}


def test_tolerances_of_the_tiny_workload() -> None:
    config = Cell().config
    layer = 5 * sqrt(32) + sqrt(4) + sqrt(16) + sqrt(64)
    stages = 2 * layer + 2 * sqrt(32) + sqrt(61)
    assert tolerance.forward_stages(config.model, seq_len=16) == pytest.approx(stages)
    loss, gradients = tolerance.fp32_loss(config), tolerance.fp32_gradients(config)
    assert loss.value == pytest.approx((stages + sqrt(256)) / 2**24)
    assert gradients.value == pytest.approx((3 * stages + sqrt(256)) / 2**24)
    assert 1e-6 < loss.value < gradients.value < 1e-4
    run = ReferenceRun(initial={}, gradients=[{"w": torch.ones(3)}])
    assert values(optimizer_tolerance.moments(bound("1"), run, OptimizerConfig())) == {
        "exp_avg": 2.0,
        "exp_avg_sq": 4.0,
    }


@pytest.mark.parametrize(
    ("order", "condition"), [(2.0, 1.0), (1.0, 2.0 * 5.0 / 7.0), (3.0, 5.0 / 91 ** (1 / 3)), (inf, 1.25)]
)
def test_condition_of_a_norm(order: float, condition: float) -> None:
    """Four elements: 3, 4 and two zeros. No error of a given 2-norm changes the norm by more than the condition."""
    gradients = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0], [0.0]])}
    assert tolerance.norm_condition(gradients, order=order) == pytest.approx(condition)
    norm = total_norm(gradients.values(), order=order)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        error = {name: torch.randn(grad.shape, generator=generator) * 1e-3 for name, grad in gradients.items()}
        size = total_norm(error.values(), order=2.0) / total_norm(gradients.values(), order=2.0)
        changed = total_norm([grad.double() + error[name] for name, grad in gradients.items()], order=order)
        assert abs(changed - norm) / norm <= condition * size * (1 + 1e-9)


def test_rounding_of_a_norm_whose_terms_are_given() -> None:
    gradients = {"w": torch.ones(64)}
    assert tolerance.norm(gradients, order=inf) == EXACT
    assert tolerance.norm(gradients, order=3.0) == tolerance.norm(gradients, order=1.0)
    assert tolerance.norm(gradients, order=3.0).value == 8 / 2**24
    assert values(tolerance.clipping(gradients, order=inf)) == {"w": 3 / 2**24}
    mixed = gradients | {"v": torch.ones(36, dtype=torch.bfloat16)}
    assert tolerance.norm(mixed, order=inf) == EXACT
    assert tolerance.norm(mixed, order=2.0).value == 1 / 2**8 + 10 / 2**24
    assert tolerance.norm(mixed, order=2.0, roundings=3.0).value == 3 / 2**8 + 10 / 2**24
    assert values(tolerance.clipping(mixed, order=inf)) == {"w": 3 / 2**24, "v": 1 / 2**24 + 2 / 2**8}


@pytest.mark.parametrize(
    ("axes", "roundings"),
    [
        ({"mesh": "dp2-tp2"}, 1.0),
        ({"mesh": "dp2-tp2", "sequence_parallel": False}, 1.0),
        ({"mesh": "tp2", "sequence_parallel": False, "norms_in_tp": False}, 2.0 + 2.0),
        ({"mesh": "dp4-tp2", "sequence_parallel": False, "norms_in_tp": False, "norm_type": "1"}, 2.0 + 5.0 + 3.0),
    ],
)
def test_roundings_of_norms_that_no_fp32_gradient_raises(axes: dict[str, Any], roundings: float) -> None:
    assert tolerance.norm_roundings(Cell(precision="bf16-mixed", **axes).config) == roundings


@pytest.mark.parametrize("change", [{"n_layers": 3}, {"dim": 64}, {"ffn_dim": 128}, {"vocab_size": 122}])
def test_tolerances_grow_with_the_model(change: dict[str, Any]) -> None:
    config = Cell().config
    larger = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **change))
    for bound_of in (tolerance.fp32_loss, tolerance.fp32_gradients):
        assert 0 < bound_of(config).value < bound_of(larger).value


def test_no_bit_may_differ_from_the_emulation_where_sums_have_one_order() -> None:
    emulated = Emulation(1.0, {"w": torch.ones(2)}, {"w": 1.5})

    def largest(mesh: str, **axes: Any) -> float:
        return tolerance.emulated_gradients(Cell(mesh=mesh, **axes).config, emulated)["w"].value

    for mesh in ("dp1", "dp2", "hsdp2x2", "tp2", "dp2-tp4"):
        assert largest(mesh, precision="bf16-mp") == 0.0
    assert largest("dp2") == largest("hsdp2x2") == largest("dp2-tp2") == 0.0
    assert largest("dp4") == largest("dp4", precision="bf16-mp") == pytest.approx(2 * 3 * 1.5 / 2**24)
    assert largest("dp4") < largest("dp8") < largest("tp4")
    assert largest("dp2", compile=True) == largest("tp2", compile=True, precision="bf16-mp") == 0.0  # by aot_eager
    inductor = msgspec.structs.replace(Cell(mesh="dp2").config, compile="inductor")
    assert largest("tp4") == tolerance.emulated_gradients(inductor, emulated)["w"].value
    assert largest("hsdp2x2", precision="bf16-reduce", accumulation=2) == 0.0


@pytest.mark.parametrize(
    ("mesh", "axes", "in_reductions", "later"),
    [
        ("dp4", {"accumulation": 2}, 3, 1),
        ("dp4", {"accumulation": 2, "gradient_sync": "last"}, 3, 0),
        ("dp3", {}, 2 + 1, 0),  # the quotient by three is rounded
        ("hsdp2x4", {}, 3 + 1, 0),
        ("hsdp4x2", {"accumulation": 2}, 3, 1),  # pairs of shards have one order
        ("hsdp2x4", {"accumulation": 2, "gradient_sync": "all-reduce-last"}, 3 + 1 + 1, 0),
        ("hsdp4x2", {"accumulation": 2, "gradient_sync": "all-reduce-last"}, 3, 0),
    ],
)
def test_roundings_from_the_first_sum_without_an_order_on(
    mesh: str, axes: dict[str, Any], in_reductions: int, later: int
) -> None:
    """In units of the last place of fp32: a 16-bit number has 2^16 (bf16) or 2^13 (fp16) of them."""
    emulated = Emulation(1.0, {"w": torch.ones(4)}, {"w": 1.5})
    errors = {
        precision: tolerance.emulated_gradients(
            Cell(mesh=mesh, precision=precision, **axes).config, emulated, loss_scale=2.0**10
        )["w"].value
        for precision in ("bf16-mp", "bf16-reduce", "fp16-reduce")
    }
    assert errors["bf16-mp"] == pytest.approx(2 * 1.5 * (in_reductions + later) / 2**24)
    assert errors["bf16-reduce"] == pytest.approx(2 * 1.5 * (in_reductions * 2**16 + later) / 2**24)
    # Half of the smallest number for each reduction, here and there, above a norm of 2 that is scaled by 2^10.
    assert errors["fp16-reduce"] == pytest.approx(
        2 * 1.5 * (in_reductions * 2**13 + later) / 2**24 + (later + 1) * 2.0**-24 * 2 / 2**11
    )


def summed(terms: Iterable[Tensor]) -> Tensor:
    return functools.reduce(operator.add, terms)


def averaged(terms: Iterable[Tensor]) -> Tensor:
    """Return the mean over three ranks as NCCL computes it, whose factor is in each term, for a master in bf16."""
    return summed(term * (1 / 3) for term in terms).bfloat16()


def test_gradients_of_bf16_masters_round_to_a_neighbour_after_sums_in_another_order() -> None:
    """In every order of sums over three ranks, of two micro-batches; the bound is far below the roundoff of bf16."""
    generator = torch.Generator().manual_seed(0)
    first, second = ([torch.randn(1 << 18, generator=generator) for _ in range(3)] for _ in range(2))
    uncast = [Reduction({"w": summed(x) / 3}, {"w": summed(t.abs() for t in x) / 3}) for x in (first, second)]
    gradient = summed(each.sums["w"].bfloat16() for each in uncast)
    config = Cell(mesh="dp3", precision="bf16-mixed", accumulation=2).config
    within = tolerance.emulated_gradients(config, Emulation(1.0, {"w": gradient}, {"w": 1.0}, uncast))["w"].value
    orders = [averaged(terms) + averaged(second[::-1]) for terms in itertools.permutations(first)]
    assert 0.0 < max(compare.deviation(each, gradient) for each in orders) <= within < 2.0**-9
    rounded = averaged([term.bfloat16().float() for term in first]) + averaged(second)
    assert compare.deviation(rounded, gradient) > 3 * within, "terms that are rounded are no order of sums"


def test_a_run_may_be_as_far_from_fp32_as_its_emulation_is_and_the_order_of_sums_leaves_open() -> None:
    exact, emulated = {"w": torch.tensor([4.0, 3.0])}, Emulation(1.0, {"w": torch.tensor([4.0, 3.5])}, {"w": 1.5})

    def bound_of(mesh: str) -> float:
        config = Cell(mesh=mesh, precision="fp16-mp").config
        return tolerance.emulated_deviation(config, emulated, exact, loss_scale=1.0)["w"].value

    assert bound_of("dp2") == 0.1
    assert bound_of("dp4") == pytest.approx(0.1 + 1.1 * 2 * 3 * 1.5 / 2**24)


def test_the_factor_of_bf16_errors_shrinks_with_the_number_of_tokens() -> None:
    config = Cell(precision="bf16-mp").config
    longer = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, global_batch_size=1024))
    assert 1.0 < tolerance.bf16_error_factor(longer).value < tolerance.bf16_error_factor(config).value < 1.5


def test_tolerance_of_updates() -> None:
    error, roundoff = 1e-6, tolerance.FP32_ROUNDOFF

    def largest(*, final: float = 1.0, **optimizer: Any) -> float:
        """Return the bound for three equal gradients of 0.5 that change a parameter from 2 to `final`."""
        run = ReferenceRun(
            initial={"w": torch.full((3,), 2.0)},
            grad_norms=[1.0] * 3,
            rates=[0.1] * 3,
            gradients=[{"w": torch.full((3,), 0.5)}] * 3,
            parameters={"w": torch.full((3,), final)},
        )
        bounds = optimizer_tolerance.updates(
            bound("error", error=error), run, OptimizerConfig(max_norm=0.0, **optimizer)
        )
        return bounds["w"].value

    assert largest(name="sgd") == pytest.approx(3 * (2 * error + roundoff))
    # Three equal gradients count 1 + 0.5 + 0.25, 1 + 0.5 and 1 times in a change that is as large as the first is here.
    weighted = 0.1 * (1.75 + 1.5 + 1.0) * 0.5
    momentum = {"name": "sgd", "momentum": 0.5, "lr": 0.1}
    assert largest(**momentum, final=2.0 - weighted) == pytest.approx(
        3 * (2 * error + roundoff * (2.0 - weighted) / weighted)
    )
    # A small change of a large parameter is lost in the parameter's own rounding.
    assert largest(name="sgd", final=1.5) == pytest.approx(3 * (2 * error + 3 * roundoff))
    # AdamW's step g / (|g| + eps) hardly depends on a gradient that is large against eps.
    assert largest(eps=0.001) == pytest.approx(3 * (error * (1 + 0.001 / 0.501) + roundoff))
    assert largest(eps=10.0) == pytest.approx(3 * (error * (1 + 10 / 10.5) + roundoff))
