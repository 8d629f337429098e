"""Assertions: comparisons with their metrics and messages, and judgement of steps, sweeps and memory."""

import doctest
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest
import torch
from torch import Tensor

from conformance.assertions import compare, memory_bounds, steps, sweeps
from conformance.assertions.memory_bounds import bounds_of_ranks
from conformance.assertions.sweeps import require_no_wrong_result
from conformance.bound import EXACT, Bound, bound
from conformance.judge.measurements import Measurement, collecting
from conformance.oracles.reference import Tensors, initial_model
from conformance.oracles.torch_versions import traits_of
from conformance.outcomes import ConformanceFailure, Unsupported
from conformance.plan.cells import Cell
from conformance.sweeps.trials import Swept, Wrong

NAN, INF = math.nan, math.inf


def bound_of(within: float) -> Bound:
    """Return a bound of this value; a formula has no name for NaN."""
    return Bound("b", {"b": within}) if math.isnan(within) else bound(repr(within))


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def bit_pattern(*patterns: int) -> Tensor:
    return torch.tensor(patterns, dtype=torch.int32).view(torch.float32)


Compared = tuple[dict[str, Measurement], str]
"""Measurements of a comparison, and its message if it failed."""


def run_comparison(comparison: Callable[..., None], *values: Any, **options: Any) -> Compared:
    with collecting() as measured:
        try:
            comparison(*values, name="x", **options)
        except ConformanceFailure as failure:
            return measured, str(failure)
    return measured, ""


@pytest.mark.parametrize(
    ("measured", "expected", "within", "value", "message"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, 0.0, ""),
        ([1.0, 2.1], [1.0, 2.0], 0.06, 0.05, ""),
        ([1.0, 2.1], [1.0, 2.0], 0.04, 0.05, "step 1: relative deviation 0.05, bound 0.04; measured 2.1, expected 2.0"),
        ([0.5], [0.0], 0.6, 0.5, ""),
        ([1.0, NAN], [1.0, 1.0], 9.0, None, "bound 9; measured nan, expected 1.0"),
        ([INF], [1.0], 9.0, None, "x at step 0: relative deviation inf, bound 9; measured inf"),
        ([1.0, 1.0], [1.0, NAN], 9.0, None, "measured 1.0, expected nan"),
        ([1.0, 1.0], [1.0, INF], 9.0, None, "measured 1.0, expected inf"),
        ([NAN], [NAN], 9.0, None, "x at step 0: relative deviation inf, bound 9; measured nan"),
        ([1.0], [1.0], NAN, 0.0, "bound nan"),
    ],
)
def test_scalars(
    measured: list[float], expected: list[float], within: float, value: float | None, message: str
) -> None:
    metrics, said = run_comparison(compare.scalars, measured, expected, within=bound_of(within))
    assert (message in said, bool(said)) == (True, bool(message))
    assert metrics["x"].value == (value if value is None else pytest.approx(value))
    assert (metrics["x"].lower, metrics["x"].unit) == (0.0, "relative deviation")


FROBENIUS = "x of a: relative Frobenius deviation 0.2, bound 0.19; norm 5.83095, expected 5, ratio 1.17"


@pytest.mark.parametrize(
    ("measured", "expected", "within", "message"),
    [
        ({"a": tensor(3, 4)}, {"a": tensor(3, 4)}, 0.0, ""),
        ({"a": tensor(3, 5)}, {"a": tensor(3, 4)}, 0.21, ""),
        ({"a": tensor(3, 5)}, {"a": tensor(3, 4)}, 0.19, FROBENIUS),
        # The worst is the one that exceeds its own bound the most.
        ({"a": tensor(1.5), "b": tensor(1.2)}, {"a": tensor(1), "b": tensor(1)}, {"a": 1.0, "b": 0.1}, "x of b:"),
        ({"a": tensor(1), "b": tensor(1.5)}, {"a": tensor(1), "b": tensor(1)}, {"a": 1.0, "b": 0.0}, "x of b:"),
        ({"a": tensor(1), "b": tensor(1)}, {"a": tensor(1), "b": tensor(1)}, {"a": 1.0, "b": NAN}, "bound nan"),
        ({"a": tensor(0)}, {"a": tensor(0)}, 0.0, ""),
        ({"a": tensor(0.5)}, {"a": tensor(0)}, 0.4, "deviation 0.5, bound 0.4"),
        ({"a": tensor(0)}, {"a": tensor(1)}, 0.9, "deviation 1, bound 0.9"),
        ({"a": tensor(1), "b": tensor(NAN)}, {"a": tensor(1), "b": tensor(1)}, 9.0, "x of b: relative"),
        ({"a": tensor(1), "b": tensor(INF)}, {"a": tensor(1), "b": tensor(INF)}, 9.0, "x of b: relative"),
        ({"a": tensor(1), "b": tensor(1)}, {"a": tensor(1), "b": tensor(NAN)}, 9.0, "x of b: relative"),
        ({"a": torch.ones(2, 3)}, {"a": torch.ones(3, 2)}, 9.0, "deviation inf, bound 9"),
        ({"a": tensor(1, dtype=torch.bfloat16)}, {"a": tensor(1, dtype=torch.float64)}, 0.0, ""),
        ({"a": tensor(1)}, {"b": tensor(1)}, 9.0, "x: missing ['b'], superfluous ['a']"),
        ({}, {"b": tensor(1)}, 9.0, "x: missing ['b'], superfluous []"),
    ],
)
def test_tensors(measured: Tensors, expected: Tensors, within: float | dict[str, float], message: str) -> None:
    bounds = {k: bound_of(v) for k, v in within.items()} if isinstance(within, dict) else bound_of(within)
    _, said = run_comparison(compare.tensors, measured, expected, within=bounds)
    assert (message in said, bool(said)) == (True, bool(message))


def test_tensors_are_judged_by_their_change() -> None:
    within, wide = bound("0.1"), bound("9")
    origin, expected, measured = {"a": tensor(1000)}, {"a": tensor(1001)}, {"a": tensor(1001.5)}
    assert run_comparison(compare.tensors, measured, expected, within=within)[1] == ""
    metrics, said = run_comparison(compare.tensors, measured, expected, within=within, origin=origin)
    assert "deviation 0.5, bound 0.1" in said
    change = Measurement(kind="rounding", value=0.5, lower=0.0, upper=0.1, unit="relative Frobenius deviation", at="a")
    assert metrics["x"] == msgspec.structs.replace(change, formula="0.1", ratio=1.5)
    metrics, said = run_comparison(compare.tensors, {"a": tensor(1002)}, expected, within=within, origin=origin)
    assert metrics["x"].ratio == 2.0
    assert "norm 2, expected 1, ratio 2" in said
    short, long = {"a": tensor(1)}, {"a": tensor(1, 2)}
    assert "deviation inf" in run_comparison(compare.tensors, short, long, within=wide, origin=long)[1]
    assert run_comparison(compare.tensors, measured, expected, within=wide, origin={"a": tensor(NAN)})[1]


@pytest.mark.parametrize(
    ("measured", "expected", "message"),
    [
        (tensor(1, -0.0), tensor(1, -0.0), ""),
        (tensor(1, -0.0), tensor(1, 0.0), "1 of 1 tensors differ in bits; a in 1 of 2 elements, by up to 0"),
        (bit_pattern(0x7FC00000), bit_pattern(0x7FC00000), ""),
        (bit_pattern(0x7FC00001), bit_pattern(0x7FC00000), "a in 1 of 1 elements, by up to nan"),
        (tensor(1, 2, 3), tensor(1, 2.5, 4), "a in 2 of 3 elements, by up to 1"),
        (torch.ones(2, 3), torch.ones(3, 2), "a is float32 of shape (2, 3), expected float32 of shape (3, 2)"),
        (torch.ones(1), torch.ones(1, dtype=torch.bfloat16), "a is float32 of shape (1,), expected bfloat16 of shape"),
        (torch.ones(2, 3).t(), torch.ones(3, 2), ""),
        (torch.tensor(1.0), torch.tensor(1.0), ""),
        (torch.empty(0, 4), torch.empty(0, 4), ""),
        (torch.tensor([True]), torch.tensor([False]), "a in 1 of 1 elements"),
    ],
)
def test_bits(measured: Tensor, expected: Tensor, message: str) -> None:
    metrics, said = run_comparison(compare.bits, {"a": measured}, {"a": expected})
    assert (message in said, bool(said)) == (True, bool(message))
    differing, at = float(bool(message)), "a" if message else ""
    exact = Measurement(kind="exact", value=differing, lower=0, upper=0, unit="tensors that differ, of 1", at=at)
    assert msgspec.structs.replace(metrics["x"], ratio=None) == exact


@pytest.mark.parametrize(
    ("measured", "expected", "ratio"),
    [
        (tensor(2, 4), tensor(1, 2), 2.0),
        (tensor(-1, -2), tensor(1, 2), -1.0),
        (tensor(0.5, 1.001), tensor(1, 2), 0.5),
        (tensor(2, 5), tensor(1, 2), None),
        (tensor(1, 2.001), tensor(1, 2), None),
        (tensor(0, 0), tensor(1, 2), None),
        (tensor(1, 2), tensor(0, 0), None),
        (tensor(NAN, 2), tensor(1, 2), None),
        (tensor(INF, 2), tensor(1, 2), None),
        (torch.ones(2, 1), tensor(1, 2), None),
    ],
)
def test_the_ratio_is_the_multiple_of_the_expected_tensor(
    measured: Tensor, expected: Tensor, ratio: float | None
) -> None:
    tensors = ({"a": measured}, {"a": expected})
    by_norm, _ = run_comparison(compare.tensors, *tensors, within=bound("0"))
    by_bits, _ = run_comparison(compare.bits, *tensors)
    for metrics in (by_norm, by_bits):
        assert metrics["x"].ratio == (ratio if ratio is None else pytest.approx(ratio, rel=1e-3))


def test_numbers_outside_of_their_bound_have_a_ratio() -> None:
    wrong, _ = run_comparison(compare.scalars, [1.0, 3.0], [1.0, 1.5], within=bound("0.5"))
    right, _ = run_comparison(compare.scalars, [1.0, 3.0], [1.0, 1.5], within=bound("1.5"))
    assert (wrong["x"].ratio, right["x"].ratio) == (2.0, None)
    _, said = run_comparison(compare.scalars, [1.0], [1.0, 2.0], within=bound("9"))
    assert said == "x: 1 measured, 2 expected, one for each step"


def test_nothing_is_never_equal_to_nothing() -> None:
    with pytest.raises(ValueError, match="no tensors to compare"):
        compare.bits({}, {}, name="x")
    with pytest.raises(ValueError, match="no tensors to compare"):
        compare.tensors({}, {}, name="x", within=bound("1"))
    with pytest.raises(ValueError, match="empty"):
        compare.scalars([], [], name="x", within=bound("1"))


def test_count() -> None:
    metrics, said = run_comparison(compare.count, 3, expected=4, detail="rank 1", unit="ranks")
    assert said == "x: measured 3, expected 4 ranks; rank 1"
    assert metrics == {"x": Measurement(kind="exact", value=3.0, lower=4, upper=4, unit="ranks")}
    assert run_comparison(compare.count, 4, expected=4, unit="ranks")[1] == ""


# Examples in docstrings


@pytest.mark.parametrize(("module", "least"), [(compare, 9), (sweeps, 2)])
def test_examples_are_right(module: object, least: int) -> None:
    names = {**vars(module), "torch": torch, "bound": bound, "EXACT": EXACT}
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in finder.find(module, globs=names):
        runner.run(example)
    failed, tried = runner.summarize()
    assert failed == 0
    assert tried >= least


# Steps that inductor compiled


CELL = Cell(mesh="dp2", precision="bf16-mp", compile=True)


class Recorded:
    """Record of one step that inductor compiled, with gradients made of those of the emulation and of fp32."""

    cell, device_type, kernel_type, steps = CELL, "cpu", "cpu", (0,)

    def __init__(self, gradients: Callable[[Tensors, Tensors], Tensors]) -> None:
        self.config = msgspec.structs.replace(CELL.config, compile="inductor")
        self.ranks = [SimpleNamespace(steps=[SimpleNamespace(step=0, loss_scale=1.0, skipped=False)])]
        self._of: dict[str, Tensors] = {
            "step0/parameter/": {name: p.detach() for name, p in initial_model(self.config).named_parameters()}
        }
        record: Any = self
        emulated = steps.emulation_of(record, 0)
        self.losses = [emulated.loss * 1.01]  # inductor rounds the loss otherwise, too
        self._of["step0/gradient/"] = gradients(emulated.gradients, steps.in_fp32(record, 0).gradients)

    def select(self, prefix: str) -> Tensors:
        return self._of[prefix]


Gradients = Callable[[Tensors, Tensors], Tensors]


def emulated(emulated: Tensors, _exact: Tensors) -> Tensors:
    return emulated


def rounded_less(emulated: Tensors, exact: Tensors) -> Tensors:
    return {name: exact[name] + 0.9 * (emulated[name] - exact[name]) for name in exact}


WRONG_GRADIENTS: dict[str, Gradients] = {
    "exact": lambda _emulated, exact: exact,
    "summed": lambda emulated, _: {name: grad * 2 for name, grad in emulated.items()},
    "one percent off": lambda emulated, _: {name: grad * 1.01 for name, grad in emulated.items()},
    "one missing": lambda emulated, _: {name: grad * ("wq" not in name) for name, grad in emulated.items()},
}


@pytest.mark.parametrize("gradients", [emulated, rounded_less])
def test_gradients_that_err_as_rounding_does_pass(gradients: Gradients) -> None:
    record: Any = Recorded(gradients)
    steps.compare_steps(record)
    record.losses = [2 * loss for loss in record.losses]
    with pytest.raises(ConformanceFailure, match="loss of step 0, emulated"):
        steps.compare_steps(record)


@pytest.mark.parametrize("gradients", WRONG_GRADIENTS.values(), ids=WRONG_GRADIENTS)
def test_gradients_that_err_more_or_less_fail(gradients: Gradients) -> None:
    record: Any = Recorded(gradients)
    with pytest.raises(ConformanceFailure, match="error of step 0, compared with fp32"):
        steps.compare_steps(record)


# Sweeps


WRONG = Wrong(subject="mm", fault="result", kind="even shards", cases=2, example="S(0): 1, expected 2")


@pytest.mark.parametrize(
    ("swept", "message"),
    [
        (Swept(computed={"mm": 1, "glu": 0}, refused={"mm": 0, "glu": 1}), ""),
        (Swept(computed={"mm": 1, "glu": 0}, refused={"mm": 0, "glu": 0}), "glu: not tried: 1 layouts, expected 0"),
        (
            Swept(computed={"glu": 1, "mm": 0}, refused={"glu": 0, "mm": 0}, wrong=[WRONG]),
            "mm: result of even shards: 2",
        ),
        (
            Swept(computed={"to": 0, "mm": 1}, wrong=[msgspec.structs.replace(WRONG, subject="to(dim=1)")]),
            r"^to\(dim=1\): result of even shards: 2 (?!.*not tried)",
        ),
    ],
)
def test_every_subject_is_tried_and_none_is_wrong(swept: Swept, message: str) -> None:
    if not message:
        require_no_wrong_result([swept, swept], unit="layouts")
        return
    with pytest.raises(ConformanceFailure, match=message):
        require_no_wrong_result([swept, swept], unit="layouts")


# Memory that the model does not know


class Measured(Exception):
    """A measurement was asked for."""


def measure(*_: Any, **__: Any) -> NoReturn:
    raise Measured


@pytest.mark.parametrize(
    ("version", "mesh", "in_flight", "outcome"),
    [
        ("2.8.0", "dp1", False, Unsupported),
        ("2.8.0", "dp1", True, Measured),
        ("2.8.0", "dp2", False, Measured),
        ("2.9.1", "dp1", False, Measured),
        ("2.15.0", "pp2-dp2", False, Unsupported),
        ("2.14.0", "pp2-dp2", False, Measured),
    ],
)
def test_memory_unknown_to_the_model_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, version: str, mesh: str, in_flight: bool, outcome: type[Exception]
) -> None:
    monkeypatch.setattr(memory_bounds, "traits_of", lambda _: traits_of(version))
    cell = Cell(mesh=mesh, accumulation=4 if "pp" in mesh else 1, model="cut" if "pp" in mesh else "tiny")
    with pytest.raises(outcome):
        bounds_of_ranks(measure, cell, in_flight=in_flight)
