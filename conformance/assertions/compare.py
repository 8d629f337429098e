"""Comparisons by name; each records its metric, and a failure has the measured and the expected value."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from conformance.bound import Bound
from conformance.judge.measurements import Kind, measure
from conformance.outcomes import ConformanceFailure

_CLEAR = 0.01
"""Smallest relative deviation that is no rounding error: of a ratio from 1, and of a tensor from a multiple."""


def scalars(
    measured: Sequence[float], expected: Sequence[float], *, name: str, within: Bound, each: str = "step"
) -> None:
    """Compare sequences of numbers, one number for each step (or `each`), by their largest relative deviation.

    Raises ConformanceFailure if the deviation is above the bound, if a number is not finite, or if the lengths differ.

    >>> scalars([2.5, 1.25], [2.5, 1.0], name="loss", within=bound("2 * u", u=2**-24))
    Traceback (most recent call last):
    conformance.outcomes.ConformanceFailure: loss at step 1: relative deviation 0.25, bound 1.19e-07 = 2 u; ...
    """
    __tracebackhide__ = True
    if len(measured) != len(expected):
        raise ConformanceFailure(f"{name}: {len(measured)} measured, {len(expected)} expected, one for each {each}")
    deviations = [_deviation(m, e) for m, e in zip(measured, expected, strict=True)]
    worst = max(range(len(deviations)), key=deviations.__getitem__)
    at, holds = f"{each} {worst}", deviations[worst] <= within.value
    ratio = None if holds else _multiple(_fp64(measured[worst]), _fp64(expected[worst]))
    unit = "relative deviation"
    measure(name, deviations[worst], kind="rounding", lower=0.0, upper=within, unit=unit, at=at, ratio=ratio)
    if not holds:
        raise ConformanceFailure(
            f"{name} at {at}: relative deviation {deviations[worst]:.3g}, bound {within}; "
            f"measured {measured[worst]!r}, expected {expected[worst]!r}"
        )


def tensors(
    measured: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    name: str,
    within: Bound | Mapping[str, Bound],
    origin: Mapping[str, Tensor] | None = None,
) -> None:
    """Compare tensors of any shape and dtype by their largest relative deviation in the Frobenius norm.

    `within` is one bound for all tensors or a bound for each. With `origin` the changes since `origin` are compared, so
    that an update is not judged by the size of the updated tensor. Raises ConformanceFailure if a deviation is above
    its bound or a tensor is missing, superfluous, of another shape or not finite.

    >>> expected = {"norm.weight": torch.ones(4), "output.weight": torch.ones(4, 4)}
    >>> measured = expected | {"output.weight": 2 * torch.ones(4, 4)}
    >>> tensors(measured, expected, name="gradient", within=EXACT)
    Traceback (most recent call last):
    conformance.outcomes.ConformanceFailure: gradient of output.weight: relative Frobenius deviation 1, bound 0; ...
    """
    __tracebackhide__ = True
    _require_same_names(measured, expected, name=name)
    deviations = {key: deviation(measured[key], expected[key], origin[key] if origin else None) for key in expected}
    bounds = {key: within if isinstance(within, Bound) else within[key] for key in expected}
    worst = max(deviations, key=lambda key: _excess(deviations[key], bounds[key].value))
    unit, holds = "relative Frobenius deviation", deviations[worst] <= bounds[worst].value
    changes = [_change(mapping[worst], origin[worst] if origin else None) for mapping in (measured, expected)]
    ratio = None if holds else _multiple(*changes)
    measure(name, deviations[worst], kind="rounding", lower=0.0, upper=bounds[worst], unit=unit, at=worst, ratio=ratio)
    if not holds:
        norms = [float(change.double().norm()) for change in changes]
        quotient = f", ratio {norms[0] / norms[1]:.3g}" if norms[1] else ""
        raise ConformanceFailure(
            f"{name} of {worst}: {unit} {deviations[worst]:.3g}, bound {bounds[worst]}; "
            f"norm {norms[0]:.6g}, expected {norms[1]:.6g}{quotient}"
        )


def ratio(measured: float, expected: float, *, name: str, factor: Bound) -> None:
    """Compare two positive numbers, of which neither may be larger than the other by more than a factor.

    Raises ConformanceFailure if the numbers are further apart.

    >>> ratio(3.0, 1.0, name="error of the gradient", factor=bound("2"))
    Traceback (most recent call last):
    conformance.outcomes.ConformanceFailure: error of the gradient: ratio 3, not from 0.5 to 2; ...
    """
    __tracebackhide__ = True
    quotient = measured / expected if expected else math.inf
    measure(name, quotient, kind="rounding", lower=1.0 / factor.value, upper=factor, unit="ratio")
    if not 1.0 / factor.value <= quotient <= factor.value:
        raise ConformanceFailure(
            f"{name}: ratio {quotient:.4g}, not from {1.0 / factor.value:.4g} to {factor}; "
            f"measured {measured:.4g}, expected {expected:.4g}"
        )


def distance(measured: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the Frobenius norm of the difference over all elements of all tensors, of any shape and dtype.

    Raises ConformanceFailure if names differ.

    >>> distance({"bias": torch.tensor([3.0, 4.0])}, {"bias": torch.zeros(2)})
    5.0
    """
    __tracebackhide__ = True
    _require_same_names(measured, expected, name="distance")
    squares = (float((measured[key].double() - expected[key].double()).square().sum()) for key in expected)
    return math.sqrt(sum(squares))


def bits(measured: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, name: str) -> None:
    """Compare shape, dtype and every bit of all tensors. Raises ConformanceFailure that names a tensor that differs.

    >>> bits({"bias": torch.tensor([0.0])}, {"bias": torch.tensor([-0.0])}, name="replica 1")
    Traceback (most recent call last):
    conformance.outcomes.ConformanceFailure: replica 1: 1 of 1 tensors differ in bits; bias in 1 of 1 elements, ...
    """
    __tracebackhide__ = True
    _require_same_names(measured, expected, name=name)
    unequal = [key for key in expected if not _same_bits(measured[key], expected[key])]
    at = unequal[0] if unequal else ""
    unit = f"tensors that differ, of {len(expected)}"
    ratio = _multiple(measured[at], expected[at]) if unequal else None
    measure(name, len(unequal), kind="exact", lower=0, upper=0, unit=unit, at=at, ratio=ratio)
    if unequal:
        raise ConformanceFailure(
            f"{name}: {len(unequal)} of {len(expected)} tensors differ in bits; "
            f"{at} {_difference(measured[at], expected[at])}"
        )


def count(measured: int, *, name: str, expected: int, detail: str = "", unit: str, kind: Kind = "exact") -> None:
    """Compare a number that must be exact. Raises ConformanceFailure with `detail` if the number differs.

    >>> count(5, name="all-gathers", expected=4, detail="layers.0 twice", unit="calls")
    Traceback (most recent call last):
    conformance.outcomes.ConformanceFailure: all-gathers: measured 5, expected 4 calls; layers.0 twice
    """
    __tracebackhide__ = True
    measure(name, measured, kind=kind, lower=expected, upper=expected, unit=unit)
    if measured != expected:
        raise ConformanceFailure(f"{name}: measured {measured}, expected {expected} {unit}; {detail}")


def none(measured: Mapping[str, int], *, details: Mapping[str, str], unit: str) -> None:
    """Compare numbers of faults by name, of which every one must be 0; all are recorded before one fails.

    Raises ConformanceFailure with the details of the first.

    >>> none({"reshard": 0, "unshard": 2}, details={"unshard": "rank 1"}, unit="wrong elements")
    Traceback (most recent call last):
    conformance.outcomes.ConformanceFailure: unshard: 2 wrong elements, expected 0; rank 1
    """
    __tracebackhide__ = True
    for name, faults in measured.items():
        measure(name, faults, kind="exact", lower=0, upper=0, unit=unit, at=details.get(name, ""))
    present = [name for name, faults in measured.items() if faults]
    if present:
        first, others = present[0], ", ".join(present[1:])
        more = f"; and {len(present) - 1} more: {others}" if others else ""
        raise ConformanceFailure(f"{first}: {measured[first]} {unit}, expected 0; {details[first]}{more}")


def between(
    measured: float, lower: float, upper: float, *, name: str, detail: str, unit: str, kind: Kind = "memory"
) -> None:
    """Compare a number with two bounds. Raises ConformanceFailure for a number outside of the bounds, and for NaN.

    >>> between(96.0, 0.0, 64.0, name="peak", detail="forward of rank 0", unit="bytes")
    Traceback (most recent call last):
    conformance.outcomes.ConformanceFailure: peak of forward of rank 0: measured 96, not from 0 to 64 bytes
    """
    __tracebackhide__ = True
    measure(name, measured, kind=kind, lower=lower, upper=upper, unit=unit, at=detail)
    if not lower <= measured <= upper:
        raise ConformanceFailure(
            f"{name} of {detail}: measured {measured:.6g}, not from {lower:.6g} to {upper:.6g} {unit}"
        )


def deviation(measured: Tensor, expected: Tensor, origin: Tensor | None = None) -> float:
    """Return the deviation of two tensors in the Frobenius norm, relative to `expected`.

    With `origin` it is relative to the change of `expected` since `origin`. Different shapes and numbers that are not
    finite deviate infinitely. The tensors have any shape and dtype; sums are in fp64.

    >>> deviation(torch.tensor([3.0]), torch.tensor([4.0]))
    0.25
    """
    if measured.shape != expected.shape or not all(bool(t.isfinite().all()) for t in (measured, expected)):
        return math.inf
    a, b = measured.double(), expected.double()
    scale = float((b - origin.double() if origin is not None else b).norm())
    difference = float((a - b).norm())
    return difference / scale if scale else difference


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


def _change(tensor: Tensor, origin: Tensor | None) -> Tensor:
    """Return the change of a tensor since `origin`; the tensor itself without one, or with one of another shape."""
    return tensor if origin is None or origin.shape != tensor.shape else tensor.double() - origin.double()


def _fp64(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def _multiple(measured: Tensor, expected: Tensor) -> float | None:
    """Return the factor, by least squares, by which `measured` is a multiple of `expected`.

    None if it is no multiple to within `_CLEAR`, if the factor is 0 or as close to 1, for different shapes and for
    numbers that are not finite.
    """
    if measured.shape != expected.shape:
        return None
    a, b = measured.double().flatten(), expected.double().flatten()
    factor = float(a.dot(b) / b.dot(b))
    is_multiple = float((a - factor * b).norm()) <= _CLEAR * float(a.norm())
    return factor if is_multiple and factor and abs(factor - 1.0) > _CLEAR else None


def _excess(deviation: float, bound: float) -> float:
    if bound > 0.0:
        return deviation / bound
    return 0.0 if deviation <= bound else math.inf  # a bound of NaN allows nothing


def _same_bits(measured: Tensor, expected: Tensor) -> bool:
    if measured.shape != expected.shape or measured.dtype != expected.dtype:
        return False
    return torch.equal(_bytes(measured), _bytes(expected))


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor of any shape and dtype, shape (numel, itemsize), uint8."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).reshape(tensor.numel(), tensor.element_size())


def _difference(measured: Tensor, expected: Tensor) -> str:
    """Return a clause about the difference of two tensors whose bits differ."""
    kinds = [f"{str(t.dtype).removeprefix('torch.')} of shape {tuple(t.shape)}" for t in (measured, expected)]
    if kinds[0] != kinds[1]:
        return f"is {kinds[0]}, expected {kinds[1]}"
    elements = int((_bytes(measured) != _bytes(expected)).any(1).sum())
    largest = float((measured.double() - expected.double()).abs().max())
    return f"in {elements} of {expected.numel()} elements, by up to {largest:.3g}"
