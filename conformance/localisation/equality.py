"""Clauses about a wrong tensor: the value that it equals instead, and where its wrong elements lie."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

CLOSE = 1e-4
"""Relative distance below which a wrong tensor is said to equal another one; faults that are told so are far larger."""
_ROUNDED = {"bf16": torch.bfloat16, "fp16": torch.float16}


def deviation(measured: Tensor, expected: Tensor) -> float:
    """Return the distance of two tensors in the Frobenius norm, relative to `expected`.

    Infinite for other shapes, and where other elements are not finite. Tensors have any shape and dtype; of integers
    and bools the distance is 0 or infinite.
    """
    if measured.shape != expected.shape:
        return math.inf
    if not expected.is_floating_point():
        return 0.0 if torch.equal(measured, expected.to(measured.dtype)) else math.inf
    if torch.equal(measured.double(), expected.double()):
        return 0.0
    a, b = measured.double(), expected.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    a, b = (tensor.where(tensor.isfinite(), 0.0) for tensor in (a, b))  # an overflow that is expected
    scale = float(b.norm())
    return float((a - b).norm()) / scale if scale else math.inf


def equals_clause(
    measured: Tensor, expected: Tensor, *, sizes: Mapping[str, float], others: Mapping[str, Tensor]
) -> str:
    """Return a clause about the value that a wrong tensor has; empty if it is none of the known ones.

    `sizes` are numbers by name, such as those of the mesh; `others` are tensors by a noun phrase, such as `the value of
    rank 0`, which the tensor may equal.
    """
    return next(_clauses(measured, expected, sizes, others), "")


def _clauses(
    measured: Tensor, expected: Tensor, sizes: Mapping[str, float], others: Mapping[str, Tensor]
) -> Iterator[str]:
    if measured.shape != expected.shape:
        yield f"has shape {tuple(measured.shape)}, expected {tuple(expected.shape)}"
        return
    if not measured.is_floating_point():
        yield from (f"is {name}" for name, other in others.items() if _is_rather(measured, other, expected))
        return
    if not bool(measured.isfinite().all()):
        count = int((~measured.isfinite()).sum())
        yield f"{count} of {measured.numel()} elements are not finite"
        return
    if not bool(measured.any()):
        yield "is zero"
        return
    yield from (f"is {name}" for name, other in others.items() if _is_rather(measured, other, expected))
    ratio = multiple(measured, expected)
    if ratio is not None and abs(ratio - 1.0) > CLOSE:
        names = ratio_names(ratio, sizes)
        yield f"{ratio:.6g} x expected{''.join(f' = {name}' for name in names)}"
    for name, dtype in _ROUNDED.items():
        if measured.dtype not in _ROUNDED.values() and torch.equal(expected.to(dtype).to(measured.dtype), measured):
            yield f"is rounded to {name}"
    if torch.equal(measured.flatten().double().sort().values, expected.flatten().double().sort().values):
        yield "has the expected elements in another order"


def multiple(measured: Tensor, expected: Tensor) -> float | None:
    """Return the factor by which a tensor is a multiple of another one, or None."""
    a, b = measured.double().flatten(), expected.double().flatten()
    if not float(b.dot(b)):
        return None
    factor = float(a.dot(b) / b.dot(b))
    return factor if float((a - factor * b).norm()) <= CLOSE * float(a.norm()) else None


def ratio_names(ratio: float, sizes: Mapping[str, float]) -> list[str]:
    """Return the names of the sizes, inverses and square roots that a ratio equals: `1/tp`, `sqrt(dp)`."""
    factors = {name: size for name, size in sizes.items() if size != 1}
    factors |= {f"sqrt({name})": math.sqrt(size) for name, size in factors.items()}
    factors |= {f"1/{name}": 1.0 / size for name, size in list(factors.items())}
    return [name for name, factor in factors.items() if abs(ratio - factor) <= CLOSE * factor]


def weights_of_terms(measured: Tensor, terms: Sequence[Tensor]) -> list[float] | None:
    """Return the weights by which a tensor is a sum of terms of its shape, by least squares; None if it is no such sum.

    With two equal terms or more than elements no weights are told.
    """
    matrix = torch.stack([term.double().flatten() for term in terms], dim=1)
    if not all(bool(tensor.isfinite().all()) for tensor in (matrix, measured)):
        return None
    if matrix.shape[0] <= matrix.shape[1] or int(torch.linalg.matrix_rank(matrix)) < matrix.shape[1]:
        return None
    target = measured.double().flatten()
    solution = torch.linalg.lstsq(matrix, target.unsqueeze(1)).solution.squeeze(1)
    residual = float((matrix @ solution - target).norm())
    return solution.tolist() if residual <= CLOSE * float(target.norm()) else None


def elements_clause(measured: Tensor, expected: Tensor, *, within: float) -> str:
    """Return a clause about the wrong elements: their rows or columns; empty if most elements are wrong."""
    if measured.shape != expected.shape or not measured.ndim or not measured.numel():
        return ""
    a, b = measured.double(), expected.double()
    scale = float(b.norm()) / math.sqrt(b.numel()) if b.isfinite().all() else 0.0
    wrong = ~((a - b).abs() <= within * scale)
    count = int(wrong.sum())
    for dim in range(measured.ndim):
        others = [other for other in range(measured.ndim) if other != dim]
        lines = wrong.any(dim=tuple(others)) if others else wrong
        indices = lines.nonzero().flatten().tolist()
        if 0 < len(indices) <= measured.shape[dim] // 2 or (0 < len(indices) < measured.shape[dim] <= 4):
            noun = "rows" if dim == 0 else "columns" if dim == measured.ndim - 1 else f"indices of dimension {dim}"
            return (
                f"{count} of {wrong.numel()} elements are wrong, in {noun} {_ranges(indices)} of {measured.shape[dim]}"
            )
    return f"{count} of {wrong.numel()} elements are wrong" if count < wrong.numel() else ""


def _ranges(indices: Sequence[int]) -> str:
    if len(indices) == indices[-1] - indices[0] + 1:
        return str(indices[0]) if len(indices) == 1 else f"{indices[0]} to {indices[-1]}"
    return ", ".join(map(str, indices[:4])) + (f" and {len(indices) - 4} more" if len(indices) > 4 else "")


def _is_rather(measured: Tensor, other: Tensor, expected: Tensor) -> bool:
    """Return whether a wrong tensor equals another one, and not as well as it equals the expected one."""
    distance = deviation(measured, other)
    return distance <= CLOSE and distance < deviation(measured, expected) / 2
