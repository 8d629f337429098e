"""Comparisons by name: each puts its figure into the report, and says what was expected and measured if it fails."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from conformance.judge.measurements import measure
from conformance.outcomes import ConformanceFailure


def scalars(
    measured: Sequence[float], expected: Sequence[float], *, name: str, within: float, each: str = "step"
) -> None:
    """Largest relative deviation of a sequence of numbers, one for each step, or whatever `each` names.

    Raises ConformanceFailure if it is above `within`, if a number is not finite, or if the lengths differ.
    """
    __tracebackhide__ = True
    if len(measured) != len(expected):
        raise ConformanceFailure(f"{name}: {len(measured)} {each}s measured, {len(expected)} expected")
    deviations = [_deviation(m, e) for m, e in zip(measured, expected, strict=True)]
    worst = max(range(len(deviations)), key=deviations.__getitem__)
    measure(name, deviations[worst], lower=0.0, upper=within, unit="relative deviation")
    if not deviations[worst] <= within:
        raise ConformanceFailure(
            f"{name} at {each} {worst}: measured {measured[worst]!r}, expected {expected[worst]!r}; "
            f"relative deviation {deviations[worst]:.3g} is above {within:.3g}"
        )


def tensors(
    measured: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    name: str,
    within: float | Mapping[str, float],
    origin: Mapping[str, Tensor] | None = None,
) -> None:
    """Largest deviation of a tensor in the Frobenius norm, relative to the expected one, over all tensors.

    `within` is one bound or one for each tensor. With `origin` the change since then is compared, so that an update
    is not judged by the size of what it updates. Raises ConformanceFailure if a deviation is above its bound or a
    tensor is missing, superfluous, of another shape or not finite.
    """
    __tracebackhide__ = True
    _require_same_names(measured, expected, name=name)
    deviations = {key: deviation(measured[key], expected[key], origin[key] if origin else None) for key in expected}
    bounds = {key: within if isinstance(within, float) else within[key] for key in expected}
    worst = max(deviations, key=lambda key: _excess(deviations[key], bounds[key]))
    measure(name, deviations[worst], lower=0.0, upper=bounds[worst], unit=f"relative Frobenius deviation of {worst}")
    if not deviations[worst] <= bounds[worst]:
        raise ConformanceFailure(
            f"{name} of {worst}: relative Frobenius deviation {deviations[worst]:.3g} is above {bounds[worst]:.3g} "
            f"(norm measured {float(measured[worst].double().norm()):.6g}, "
            f"expected {float(expected[worst].double().norm()):.6g})"
        )


def ratio(measured: float, expected: float, *, name: str, factor: float) -> None:
    """Two positive numbers that are at most a factor apart, either way. Raises ConformanceFailure otherwise."""
    __tracebackhide__ = True
    quotient = measured / expected if expected else math.inf
    measure(name, quotient, lower=1.0 / factor, upper=factor, unit="ratio")
    if not 1.0 / factor <= quotient <= factor:
        raise ConformanceFailure(
            f"{name}: measured {measured:.4g}, expected {expected:.4g}; ratio {quotient:.4g} is not between "
            f"{1.0 / factor:.4g} and {factor:.4g}"
        )


def distance(measured: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Norm of the difference over all elements of all tensors. Raises ConformanceFailure if names differ."""
    __tracebackhide__ = True
    _require_same_names(measured, expected, name="distance")
    squares = (float((measured[key].double() - expected[key].double()).square().sum()) for key in expected)
    return math.sqrt(sum(squares))


def bits(measured: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, name: str) -> None:
    """Bitwise equality of all tensors. Raises ConformanceFailure that names those that differ."""
    __tracebackhide__ = True
    _require_same_names(measured, expected, name=name)
    unequal = [key for key in expected if not _same_bits(measured[key], expected[key])]
    measure(name, len(unequal), lower=0, upper=0, unit=f"tensors that differ, of {len(expected)}")
    if unequal:
        worst = unequal[0]
        raise ConformanceFailure(
            f"{name}: {len(unequal)} of {len(expected)} tensors differ in bits; "
            f"{worst} {_difference(measured[worst], expected[worst])}"
        )


def count(measured: int, *, name: str, expected: int, detail: str = "", unit: str) -> None:
    """A number that has to be exact. Raises ConformanceFailure with `detail` otherwise."""
    __tracebackhide__ = True
    measure(name, measured, lower=expected, upper=expected, unit=unit)
    if measured != expected:
        raise ConformanceFailure(f"{name}: measured {measured}, expected {expected} {unit}; {detail}")


def between(measured: float, lower: float, upper: float, *, name: str, detail: str, unit: str) -> None:
    """A number that has to lie between two bounds. Raises ConformanceFailure otherwise, also for NaN."""
    __tracebackhide__ = True
    measure(name, measured, lower=lower, upper=upper, unit=unit)
    if not lower <= measured <= upper:
        raise ConformanceFailure(
            f"{name} of {detail}: measured {measured:.6g}, not from {lower:.6g} to {upper:.6g} {unit}"
        )


def _require_same_names(measured: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, name: str) -> None:
    __tracebackhide__ = True
    if measured.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - measured.keys()), sorted(measured.keys() - expected.keys())
        raise ConformanceFailure(f"{name}: missing {missing}, superfluous {extra}")
    if not expected:
        raise ValueError(f"{name}: no tensors to compare")


def _deviation(measured: float, expected: float) -> float:
    if not (math.isfinite(measured) and math.isfinite(expected)):
        return math.inf
    return abs(measured - expected) / abs(expected) if expected else abs(measured)


def deviation(measured: Tensor, expected: Tensor, origin: Tensor | None = None) -> float:
    """In the Frobenius norm, relative to `expected`, or to its change since `origin`; infinite for another shape, and
    for numbers that are not finite."""
    if measured.shape != expected.shape or not all(bool(t.isfinite().all()) for t in (measured, expected)):
        return math.inf
    a, b = measured.double(), expected.double()
    scale = float((b - origin.double() if origin is not None else b).norm())
    difference = float((a - b).norm())
    return difference / scale if scale else difference


def _excess(deviation: float, bound: float) -> float:
    if bound > 0.0:
        return deviation / bound
    return 0.0 if deviation <= bound else math.inf  # a bound of NaN allows nothing


def _same_bits(measured: Tensor, expected: Tensor) -> bool:
    if measured.shape != expected.shape or measured.dtype != expected.dtype:
        return False
    return torch.equal(_bytes(measured), _bytes(expected))


def _bytes(tensor: Tensor) -> Tensor:
    """A row of bytes for each element."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).reshape(tensor.numel(), tensor.element_size())


def _difference(measured: Tensor, expected: Tensor) -> str:
    """What distinguishes two tensors whose bits differ."""
    kinds = [f"{str(t.dtype).removeprefix('torch.')} of shape {tuple(t.shape)}" for t in (measured, expected)]
    if kinds[0] != kinds[1]:
        return f"is {kinds[0]}, expected {kinds[1]}"
    elements = int((_bytes(measured) != _bytes(expected)).any(1).sum())
    largest = float((measured.double() - expected.double()).abs().max())
    return f"in {elements} of {expected.numel()} elements, by up to {largest:.3g}"
