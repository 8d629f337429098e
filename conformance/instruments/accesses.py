"""Memory that operators access: the arguments that they read and write, with their storages and byte ranges.

An operator's schema says which arguments it writes; the schemas of the operators that communicate, and of one of
FSDP2's, do not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from conformance.instruments.happens_before import Entry, Release

_IDENTITY = "_conformance_identity"
"""Attribute of a storage. torch keeps the Python object of a storage, with its attributes, as long as the storage."""
_UNINITIALIZED = (
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
)
"""Operators that allocate memory and do not touch it."""
_UNDECLARED_VIEWS = ("aten::_unsafe_view",)
"""Operators that return a view although their schema does not say so."""
_UNDECLARED_WRITES = {
    "c10d": ("output", "outputs", "output_tensor", "output_tensors", "output_lists", "tensors"),
    "fsdp::all_gather_copy_in": ("all_gather_output",),
}
"""Arguments that an operator, or any operator of a namespace, writes although its schema does not say so."""


@dataclass(frozen=True)
class AccessedTensors:
    """Tensors among the arguments and results of an operator that its calls access."""

    operator: str
    """Name of the operator, such as `aten::mm`."""
    slots: tuple[tuple[int, str, bool], ...]
    """Position and name of each argument with tensors, and whether it is written."""
    allocates: bool
    """True if results are new memory."""
    initializes: bool
    """True if results are written; `empty` only allocates."""

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Tensor, bool]]:
        """Return each tensor in the arguments of a call, and whether it is written."""
        found: list[tuple[Tensor, bool]] = []
        for position, name, writes in self.slots:
            value = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(value, Tensor):
                found.append((value, writes))
            elif value is not None:
                found += [(tensor, writes) for tensor in _tensors(value)]
        return found

    def results(self, result: Any) -> list[Tensor]:
        """Return the tensors in the result of a call that may be new memory of the CPU."""
        if not self.allocates:
            return []
        return [tensor for tensor in _tensors(result) if tensor.is_cpu and tensor.numel()]


@cache
def accessed_tensors(func: Any) -> AccessedTensors | None:
    """Return the tensors that calls of an operator overload access, by its schema; None if there are none: a view."""
    schema = func._schema
    undeclared = _UNDECLARED_WRITES.get(schema.name) or _UNDECLARED_WRITES.get(schema.name.partition("::")[0]) or ()
    slots = tuple(
        (position, argument.name, _is_written(argument) or argument.name in undeclared)
        for position, argument in enumerate(schema.arguments)
        if "Tensor" in str(argument.type)
    )
    writes = any(written for *_, written in slots)
    is_view = schema.name in _UNDECLARED_VIEWS or any(
        r.alias_info and not r.alias_info.is_write for r in schema.returns
    )
    if is_view and not writes:
        return None
    allocates = any(r.alias_info is None and "Tensor" in str(r.type) for r in schema.returns)
    if schema.name in _UNINITIALIZED:
        return AccessedTensors(schema.name, (), allocates=True, initializes=False)
    return AccessedTensors(schema.name, slots, allocates, initializes=True) if slots or allocates else None


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value, or in nested lists of values."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the offsets, in bytes from the begin of its storage, of a tensor's first byte and behind its last one."""
    start, itemsize = int(tensor.storage_offset()), tensor.itemsize
    if tensor.is_contiguous():
        return start * itemsize, (start + tensor.numel()) * itemsize
    last = sum(int(size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * itemsize, (start + last + 1) * itemsize


class _Identity:
    """Number of a storage, referenced by the storage alone, so that both are released together."""

    __slots__ = ("_entries", "number")

    def __init__(self, number: int, entries: list[Entry]) -> None:
        self.number, self._entries = number, entries

    def __del__(self) -> None:
        self._entries.append(Release(self.number))


def identity_of(tensor: Tensor) -> int | None:
    """Return the number of a tensor's storage, None if it has none yet."""
    identity: _Identity | None = getattr(tensor.untyped_storage(), _IDENTITY, None)
    return None if identity is None else identity.number


def identify(tensor: Tensor, number: int, entries: list[Entry]) -> None:
    """Give a tensor's storage a number, and add its release to the entries."""
    setattr(tensor.untyped_storage(), _IDENTITY, _Identity(number, entries))


def require_identities() -> None:
    """Raise RuntimeError for a torch whose storages lose their attributes while they live."""
    tensor = torch.empty(1)
    identify(tensor, 1, [])
    if identity_of(tensor) != 1:
        raise RuntimeError(
            f"torch {torch.__version__}: a storage forgets its attributes; conformance/instruments/accesses.py needs "
            "another way to tell storages apart"
        )
