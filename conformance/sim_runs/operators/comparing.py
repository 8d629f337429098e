"""Comparison of the results of one call on two devices, in every bit."""

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conformance.sim_runs.operators.samples import tensors

_LONGEST = 160
_UNDEFINED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
"""Operators whose results are not initialised."""


class Snapshot(NamedTuple):
    """Facts of a tensor, and its bits, on the host."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides of dimensions with more than one element, in a tensor with elements; the others mean nothing."""
    layout: str
    needs_gradient: bool
    is_conjugate: bool
    bits: bytes | None
    """None if the values are undefined."""


def snapshots(name: str, results: Any) -> list[Snapshot]:
    """Return a snapshot of each tensor among the results of an operator, in order, and of each number."""
    undefined = name.partition(".")[0] in _UNDEFINED
    found = [_snapshot(tensor, with_bits=not undefined) for tensor in tensors(results)]
    return found or [Snapshot(type(results).__name__, (), (), "", False, False, repr(results).encode())]


def _snapshot(tensor: Tensor, *, with_bits: bool) -> Snapshot:
    host = tensor.detach().to("cpu")
    is_strided = host.layout == torch.strided
    dense = (host if is_strided else host.to_dense()).resolve_conj().resolve_neg().contiguous().reshape(-1)
    return Snapshot(
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        _strides(tensor) if is_strided else (),
        str(tensor.layout),
        tensor.requires_grad,
        tensor.is_conj(),
        bytes(dense.view(torch.uint8).numpy(force=True).tobytes()) if with_bits else None,
    )


def _strides(tensor: Tensor) -> tuple[int, ...]:
    sized = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(stride for size, stride in sized if size > 1) if tensor.numel() else ()


def difference(measured: list[Snapshot], expected: list[Snapshot]) -> str:
    """Return the first difference between results, such as `bits of result 1`, or "" if there is none."""
    if len(measured) != len(expected):
        return f"{len(measured)} results instead of {len(expected)}"
    for number, pair in enumerate(zip(measured, expected, strict=True)):
        for field, one, other in zip(Snapshot._fields, *pair, strict=True):
            if one != other:
                shown = "" if field == "bits" else f": {one!s} instead of {other!s}"
                return f"{field} of result {number}{shown}"
    return ""


def reason(error: BaseException) -> str:
    """Return class and message of an error in one line, with the numbers left out, as a key by which to count."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {re.sub(r'[0-9]+', 'N', first)}"[:_LONGEST]
