"""Shims: replacements of names that a trainer needs and a processor lacks, which its author picks one by one.

A shim is used before the trainer is imported, at the top of the subject's file, and the report names it: verdicts hold
for a trainer with that name replaced.
"""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.nn import functional

from conformance.subjects.protocol import SubjectMistake
from reference_trainer.strict_yaml import allowed

_used: dict[str, str] = {}
"""Replacements in use, by the names of their shims."""


def use_shims(*names: str) -> None:
    """Make these replacements, each a name of `SHIMS`, in this process, until it ends.

    Raises SubjectMistake for an unknown name.
    """
    for name in names:
        if name not in SHIMS:
            raise SubjectMistake(f"unknown shim `{name}`{allowed(name, SHIMS)}")
        if name not in _used:
            SHIMS[name]()
            _used[name] = (SHIMS[name].__doc__ or "").splitlines()[0]


def used_shims() -> list[str]:
    """Return the names of the shims in use, each with its replacement."""
    return [f"{name}: {replaced}" for name, replaced in _used.items()]


def _attention_of_local_heads() -> None:
    """`F.scaled_dot_product_attention` of DTensors computes each rank's samples and heads by themselves.

    On processors torch has no sharding strategy for its kernel. Shards of the sequence are refused.
    """
    original = functional.scaled_dot_product_attention

    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if not isinstance(query, DTensor):
            return original(query, key, value, attn_mask, *args, **kwargs)
        inputs = [query, key, value, *([attn_mask] if isinstance(attn_mask, DTensor) else [])]
        layouts = {tuple(each.placements) if isinstance(each, DTensor) else None for each in inputs[:3]}
        if len(layouts) > 1 or any(_is_of_sequence(placement) for placement in query.placements):
            raise SubjectMistake(
                f"attention of DTensors with placements {layouts}: shard samples or heads alone, alike"
            )
        query_heads, key_heads, value_heads, *masks = map(_with_gradient, inputs)
        mask = masks[0] if masks else attn_mask
        attended = original(query_heads, key_heads, value_heads, mask, *args, **kwargs)
        return DTensor.from_local(attended, query.device_mesh, query.placements, run_check=False)

    functional.scaled_dot_product_attention = scaled_dot_product_attention


def _with_gradient(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_of_sequence(placement: Placement) -> bool:
    return placement.is_partial() or (placement.is_shard() and getattr(placement, "dim", 0) not in (0, 1))


def _cuda_as_processor() -> None:
    """`torch.cuda` has one device, which is the processor: calls that choose it or wait for it do nothing.

    `Tensor.cuda` and `Module.cuda` leave a tensor or a module where it is, and `torch.device("cuda:0")` is the
    processor.
    """
    replaced: Mapping[str, Callable[..., Any]] = {
        "current_device": lambda: torch.device("cpu"),
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "max_memory_allocated": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
    }
    for name, function in replaced.items():
        setattr(torch.cuda, name, function)
    for kind in (Tensor, nn.Module):
        kind.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.device = _Device  # type: ignore[misc]


class _DeviceType(type):
    """Type of `_Device`, of which all devices are instances."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _OWN_DEVICE)


class _Device(metaclass=_DeviceType):
    """`torch.device`, which makes the processor of a CUDA device."""

    __module__, __qualname__ = "torch", "device"  # under which devices are pickled

    def __new__(cls, *given: Any, **named: Any) -> Any:
        is_cuda = str(given[0] if given else named.get("type", "")).startswith("cuda")
        return _OWN_DEVICE("cpu") if is_cuda else _OWN_DEVICE(*given, **named)


_OWN_DEVICE = torch.device


def _importable_triton() -> None:
    """`import triton` succeeds; a kernel that is launched raises.

    Many packages import triton at the top of a module whose kernels a run on processors does not reach.
    """
    if importlib.util.find_spec("triton") is None:
        for name in ("triton", "triton.language"):
            sys.modules[name] = _Placeholder(name)


class _Placeholder(ModuleType):
    """Module of a package that is not there: each name in it is a decorator, and raises when it is launched."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unavailable(f"{self.__name__}.{name}")


class _Unavailable:
    """Name of a package that is not there, or a kernel that such a name has decorated."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *functions: Any, **options: Any) -> Any:
        return (
            _Unavailable(getattr(functions[0], "__name__", self._name))
            if functions and callable(functions[0])
            else self
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unavailable(f"{self._name}.{name}")

    def __getitem__(self, grid: Any) -> Any:
        raise SubjectMistake(f"`{self._name}` is launched, and triton is a shim here: choose a path without kernels")


SHIMS: Mapping[str, Callable[[], None]] = {
    "attention-of-local-heads": _attention_of_local_heads,
    "cuda-as-processor": _cuda_as_processor,
    "importable-triton": _importable_triton,
}
"""Shims by name; a call makes the replacement, which the first line of the function's docstring names."""
