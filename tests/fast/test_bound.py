"""Bounds: the printed formula is the applied one, for every bound that oracles of tolerances give to laws."""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance.bound import EXACT, Bound, bound
from conformance.oracles import optimizer_tolerance, tolerance
from conformance.oracles.emulation import Emulation
from conformance.oracles.reference import ReferenceRun, total_norm
from conformance.plan.cells import Cell
from reference_trainer.config import OptimizerConfig

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

OPERATIONS: dict[type[ast.operator], Callable[[Decimal, Decimal], Decimal]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
FUNCTIONS: dict[str, Callable[..., Decimal]] = {"sqrt": Decimal.sqrt, "max": max, "min": min}


def evaluated(expression: str, numbers: Mapping[str, Decimal]) -> Decimal:
    """Evaluate an expression over named numbers, in decimal arithmetic of 40 digits."""

    def value(node: ast.expr) -> Decimal:
        match node:
            case ast.Constant(value=int(number)):
                return Decimal(number)
            case ast.Name(id=name):
                return numbers[name]
            case ast.BinOp(left=left, op=operation, right=right):
                return OPERATIONS[type(operation)](value(left), value(right))
            case ast.Call(func=ast.Name(id=function), args=arguments):
                return FUNCTIONS[function](*map(value, arguments))
        raise AssertionError(f"{expression}: cannot evaluate {ast.dump(node)}")

    with localcontext(prec=40):
        return value(ast.parse(expression, mode="eval").body)


def exact_value(of: Bound) -> Decimal:
    numbers = {name: exact_value(t) if isinstance(t, Bound) else Decimal(t) for name, t in of.terms.items()}
    return evaluated(of.formula, numbers)


def printed_value(derivation: str, numbers: Mapping[str, float]) -> Decimal:
    """Evaluate a derivation as it is printed: a space between two factors multiplies them."""
    formula, *definitions = re.split(r", (?=\w+ = )", derivation)
    known = {name: Decimal(number) for name, number in numbers.items()}
    for name, text in reversed([definition.split(" = ") for definition in definitions]):
        known[name] = evaluated(with_products(text), known)
    return evaluated(with_products(formula), known)


def with_products(text: str) -> str:
    # In `a / b c` a reader cannot tell whether c divides.
    assert not re.search(r"/ [\w.]+ [\w(]", text), text
    return re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", text)


def named_numbers(of: Bound) -> Iterator[tuple[str, float]]:
    for name, term in of.terms.items():
        yield name, term.value if isinstance(term, Bound) else term
        if isinstance(term, Bound):
            yield from named_numbers(term)


@given(BOUNDS)
@settings(deadline=None)
def test_bounds_are_the_values_of_their_formulas(bounds: Mapping[str, Bound]) -> None:
    for name, each in bounds.items():
        assert each.value == pytest.approx(float(exact_value(each)), rel=1e-14), name


@given(BOUNDS)
@settings(deadline=None)
def test_bounds_read_as_they_are_computed(bounds: Mapping[str, Bound]) -> None:
    for name, each in bounds.items():
        value = printed_value(each.derivation, each.numbers)
        assert each.value == pytest.approx(float(value), rel=1e-14), name
        expected = f"{each.value:.3g}" if each == EXACT else f"{each.value:.3g} = {each.derivation}"
        assert str(each) == expected, name


@given(BOUNDS)
@settings(deadline=None)
def test_no_name_in_a_bound_stands_for_two_numbers(bounds: Mapping[str, Bound]) -> None:
    for name, each in bounds.items():
        values: dict[str, set[float]] = {}
        for term, number in named_numbers(each):
            values.setdefault(term, set()).add(number)
        assert {term: numbers for term, numbers in values.items() if len(numbers) > 1} == {}, f"{name}: {each}"


@pytest.mark.parametrize(
    ("of", "text"),
    [
        (EXACT, "0"),
        (bound("2 * e", e=bound("u * n", u=0.5, n=3)), "3 = 2 e, e = u n"),
        (tolerance.fp32_gradients(Cell().config), "1.95e-05 = u (3 F + sqrt(tokens))"),
        (
            tolerance.both(tolerance.fp32_loss(Cell(tf32=True).config)),
            "0.0262 = 2 g, g = u (F + sqrt(tokens)) + T, T = products (2 t + t**2 + tokens cut)",
        ),
    ],
    ids=lambda value: "" if isinstance(value, Bound) else value.partition(" ")[0],
)
def test_rendering(of: Bound, text: str) -> None:
    assert str(of) == text


# Numbers that the functions returned before they returned bounds.
W, V = torch.full((3, 4), 0.25), torch.full((5,), 0.5, dtype=torch.bfloat16)
RUN = ReferenceRun({"w": W}, grad_norms=[0.5], rates=[0.001] * 2, gradients=[{"w": W}] * 2, parameters={"w": W + 0.125})
ADAMW, GRADIENTS = OptimizerConfig(), tolerance.fp32_gradients(Cell().config)


@pytest.mark.parametrize(
    ("of", "value"),
    [
        (tolerance.fp32_loss(Cell().config), 7.1342289847025405e-06),
        (tolerance.fp32_gradients(Cell(tf32=True).config), 0.03930491670978126),
        (
            tolerance.fp16_gradients(Cell(precision="fp16-reduce").config, {"w": W}, loss_scale=0.25)["w"],
            0.16067863309170838,
        ),
        (optimizer_tolerance.updates(GRADIENTS, RUN, ADAMW)["w"], 3.9348306070869594e-05),
        (
            optimizer_tolerance.moments(GRADIENTS, RUN, ADAMW)["exp_avg_sq"],
            7.798135328518049e-05,
        ),
        (tolerance.bf16_error_factor(Cell().config), 1.3228756555322954),
        (tolerance.clipping({"w": W, "v": V}, order=2.0)["v"], 0.011719055360890962),
        (optimizer_tolerance.replayed_updates(RUN, ADAMW)["w"], 1.9626738566324417e-06),
    ],
    ids=["loss", "tf32", "fp16", "updates", "moments", "bf16", "clipping", "replayed"],
)
def test_values_are_those_of_before(of: Bound, value: float) -> None:
    assert of.value == pytest.approx(value, rel=1e-12)
