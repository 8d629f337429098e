"""Tolerances: bounds on cases small enough for another computation, on TF32 and on samples, and their formulas."""

import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf, sqrt
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.assertions import compare
from conformance.bound import EXACT, Bound, bound
from conformance.oracles import optimizer_tolerance, tolerance
from conformance.oracles.emulation import Emulation, Reduction
from conformance.oracles.reference import Batch, ReferenceRun, Tensors, initial_model, total_norm
from conformance.plan.cells import Cell
from conformance.run.ranks.process import reset_process_state
from reference_trainer.config import OptimizerConfig, TrainerConfig
from reference_trainer.data import IGNORED_LABEL, Batches
from reference_trainer.mesh import check_device, set_tf32


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


# TF32


CONFIG = Cell(mesh="dp1", tf32=True).config


def test_tf32_is_set_for_a_device_alone_and_off_in_the_next_task() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    set_tf32(CONFIG, cuda)
    assert torch.backends.cuda.matmul.allow_tf32
    reset_process_state()
    assert not torch.backends.cuda.matmul.allow_tf32
    set_tf32(CONFIG, cpu)
    assert not torch.backends.cuda.matmul.allow_tf32
    check_device(CONFIG, cuda)
    with pytest.raises(ValueError, match="this run is on device cpu: set tf32=false"):
        check_device(CONFIG, cpu)


def to_tf32(x: Tensor) -> Tensor:
    """Round fp64 numbers, of any shape, to the nearest with 10 + 1 bits; returns fp64."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0**11).round() / 2.0**11, exponent)


class RoundedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that rounds the factors of all products, in forward and backward, as a device with TF32 does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::bmm"):
            args = tuple(to_tf32(arg) for arg in args)
        elif func._schema.name == "aten::addmm":
            args = (args[0], *(to_tf32(arg) for arg in args[1:]))
        return func(*args, **(kwargs or {}))


def gradients(config: TrainerConfig, batch: Batch, context: Callable[[], Any]) -> Tensors:
    """Return the gradients of the mean loss in fp64, with attention made of products that the mode sees."""
    model = initial_model(config).double()
    parameters = dict(model.named_parameters())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), context():
        logits = model(batch[0]).flatten(0, 1)
        loss = F.cross_entropy(logits, batch[1].flatten(), ignore_index=IGNORED_LABEL)
        return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rounded_products_are_within_the_bound_and_outside_that_of_fp32(seed: int) -> None:
    config = Cell(mesh="dp1", tf32=True, seed=seed).config
    batch = Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed).global_batch(0)
    exact, rounded = gradients(config, batch, torch.enable_grad), gradients(config, batch, RoundedProducts)
    deviations = {name: float((rounded[name] - grad).norm() / grad.norm()) for name, grad in exact.items()}
    bound = tolerance.fp32_gradients(config).value
    assert max(deviations.values()) <= bound
    assert min(deviations.values()) > tolerance.fp32_gradients(Cell(mesh="dp1", seed=seed).config).value


# Formulas


AXES: list[dict[str, Any]] = [
    {},
    {"tf32": True},
    {"mesh": "dp8", "clip": 0.0},
    {"mesh": "dp2-tp2", "optimizer": "sgd"},
    {"mesh": "dp2", "optimizer": "sgd-momentum"},
    {"mesh": "hsdp2x2", "precision": "fp16-reduce", "accumulation": 2},
    {"precision": "fp16-mp", "norm_type": "1"},
    {"mesh": "dp4", "precision": "bf16-mp", "norm_type": "inf"},
    {"mesh": "dp4", "norm_type": "3", "model": "even"},
]


def sampled(
    seed: int, dtypes: tuple[torch.dtype, ...], *, like: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return tensors of small shapes in these dtypes by name, a little away from `like` if that is given."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, 4), (7,), (2, 1))
    samples = {str(index): torch.randn(shape, generator=generator) for index, shape in enumerate(shapes)}
    if like:
        return {name: like[name] + 0.1 * sample for name, sample in samples.items()}
    return {name: sample.to(dtype) for (name, sample), dtype in zip(samples.items(), dtypes, strict=True)}


def all_bounds(axes: Mapping[str, Any], seed: int, steps: int, loss_scale: float) -> dict[str, Bound]:
    """Return each bound that the oracles derive for a cell and random gradients, by function and tensor."""
    config = Cell(**axes).config
    optimizer, order = config.optimizer, config.optimizer.norm_order
    fp32 = (torch.float32,) * 3
    gradients = [sampled(seed + step, fp32) for step in range(steps)]
    mixed = sampled(seed, (torch.float32, torch.bfloat16, torch.float16))
    initial = sampled(seed + 100, fp32)
    norms = [total_norm(step.values(), order=order) for step in gradients]
    run = ReferenceRun(
        initial,
        grad_norms=norms,
        rates=[optimizer.lr] * steps,
        gradients=gradients,
        parameters=sampled(seed + 200, fp32, like=initial),
        optimizer_state={"momentum_buffer": sampled(seed + 300, fp32)},
    )
    emulated = Emulation(1.0, gradients[0], {name: 1.0 + index for index, name in enumerate(gradients[0])})
    bounds: dict[str, Bound | Mapping[str, Any]] = {
        "fp32_loss": tolerance.fp32_loss(config),
        "fp16_gradients": tolerance.fp16_gradients(config, gradients[0], loss_scale=loss_scale),
        "fp16_gradients of zeros": tolerance.fp16_gradients(config, {"0": torch.zeros(2)}, loss_scale=loss_scale),
        "emulated_gradients": tolerance.emulated_gradients(config, emulated),
        "bf16_error_factor": tolerance.bf16_error_factor(config),
        "norm": tolerance.norm(mixed, order=order),
        "clipping": tolerance.clipping(mixed, order=order),
        "replayed_updates": optimizer_tolerance.replayed_updates(run, optimizer),
        "replayed_state": optimizer_tolerance.replayed_state(run, optimizer),
    }
    single = tolerance.fp32_gradients(config)
    for name, error in {"fp32_gradients": single, "both": tolerance.both(single)}.items():
        bounds |= {
            f"{name}": error,
            f"gradient_norm, {name}": tolerance.gradient_norm(error, gradients[0], order=order),
            f"updates, {name}": optimizer_tolerance.updates(error, run, optimizer),
            f"moments, {name}": optimizer_tolerance.moments(error, run, optimizer),
            f"clipped_gradients, {name}": tolerance.clipped_gradients(error, gradients[0], order=order),
        }
    return dict(_flat(bounds))


def _flat(bounds: Mapping[str, Bound | Mapping[str, Any]]) -> Iterator[tuple[str, Bound]]:
    for name, value in bounds.items():
        if isinstance(value, Bound):
            yield name, value
        else:
            yield from ((f"{name} of {key}", flat) for key, flat in _flat(value))


BOUNDS = st.builds(
    all_bounds,
    axes=st.sampled_from(AXES),
    seed=st.integers(0, 50),
    steps=st.integers(1, 3),
    loss_scale=st.integers(-20, 20).map(lambda exponent: 2.0**exponent),
)


def printed_value(derivation: str, numbers: Mapping[str, float]) -> float:
    """Evaluate a derivation as it is printed: a space between two factors multiplies them."""
    formula, *definitions = re.split(r", (?=\w+ = )", derivation)
    names = {"sqrt": sqrt, "max": max, "min": min, **numbers}
    for name, text in reversed([definition.split(" = ") for definition in definitions]):
        names[name] = eval(with_products(text), names)
    return float(eval(with_products(formula), names))


def with_products(text: str) -> str:
    # In `a / b c` a reader cannot tell whether c divides.
    assert not re.search(r"/ [\w.]+ [\w(]", text), text
    return re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", text)


def named_numbers(bound: Bound) -> Iterator[tuple[str, float]]:
    """Yield names and numbers of all terms, nested ones included."""
    for name, term in bound.terms.items():
        yield name, term.value if isinstance(term, Bound) else term
        if isinstance(term, Bound):
            yield from named_numbers(term)


@given(BOUNDS)
@settings(deadline=None)
def test_bounds_read_as_they_are_computed(bounds: Mapping[str, Bound]) -> None:
    for name, each in bounds.items():
        assert each.value == pytest.approx(printed_value(each.derivation, each.numbers), rel=1e-12), name
        assert str(each) == (f"{each.value:.3g}" if each == EXACT else f"{each.value:.3g} = {each.derivation}"), name
        values: dict[str, set[float]] = {}
        for term, number in named_numbers(each):
            values.setdefault(term, set()).add(number)
        assert all(len(numbers) == 1 for numbers in values.values()), f"{name}: a name for two numbers in {each}"


def test_rendering() -> None:
    assert str(bound("2 * e", e=bound("u * n", u=0.5, n=3))) == "3 = 2 e, e = u n"


W, V = torch.full((3, 4), 0.25), torch.full((5,), 0.5, dtype=torch.bfloat16)
RUN = ReferenceRun({"w": W}, grad_norms=[0.5], rates=[0.001] * 2, gradients=[{"w": W}] * 2, parameters={"w": W + 0.125})
ADAMW, GRADIENTS = OptimizerConfig(), tolerance.fp32_gradients(Cell().config)


@pytest.mark.parametrize(
    ("each", "value"),
    [
        (tolerance.fp32_loss(Cell().config), 7.1342289847025405e-06),
        (tolerance.fp32_gradients(Cell(tf32=True).config), 0.03930491670978126),
        (
            tolerance.fp16_gradients(Cell(precision="fp16-reduce").config, {"w": W}, loss_scale=0.25)["w"],
            0.16067863309170838,
        ),
        (optimizer_tolerance.updates(GRADIENTS, RUN, ADAMW)["w"], 3.9348306070869594e-05),
        (optimizer_tolerance.moments(GRADIENTS, RUN, ADAMW)["exp_avg_sq"], 7.798135328518049e-05),
        (tolerance.bf16_error_factor(Cell().config), 1.3228756555322954),
        (tolerance.clipping({"w": W, "v": V}, order=2.0)["v"], 0.011719055360890962),
        (optimizer_tolerance.replayed_updates(RUN, ADAMW)["w"], 1.9626738566324417e-06),
    ],
    ids=["loss", "tf32", "fp16", "updates", "moments", "bf16", "clipping", "replayed"],
)
def test_formulas_have_the_values_of_their_first_release(each: Bound, value: float) -> None:
    assert each.value == pytest.approx(value, rel=1e-12)
