"""Delayed communication and copies, which show whether a stream or a rank uses a result too early.

On a device the stream that issues the operator is kept busy (`torch.cuda._sleep`, which is not public: nothing else
keeps a stream busy without a custom kernel), so that work which does not wait for the stream runs ahead; and freed
memory is handed out again and filled with NaN. On the CPU one rank sleeps, and its peers run ahead.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from conformance.instruments.collectives import NAMESPACES, TRANSFERS, collective_kind
from conformance.instruments.dispatch_tap import DispatchTap, EarlyHandler

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "transfer", "copy")
"""Kinds of operators that can be delayed.

`transfer` sends a tensor to a rank or receives one, `copy` is a copy between device and host."""
DELAY_S = 0.02
CYCLES = 20_000_000
"""Length of a delay on a device, in cycles of its clock: some 10 ms."""
EVERY = 8
"""Average number of operators of a kind for each that is delayed.

The first is always delayed; the others are sampled, from the same seed each time: every eighth would be the same
operator in each step that has eight.
"""
_BLOCKS, _BLOCK_NUMEL = 32, 1 << 16
_COPIES = ("aten::_to_copy", "aten::copy_")


def delays(kinds: Sequence[str], *, device: torch.device, sleeps: bool) -> DispatchTap:
    """Return the context in which operators of these kinds are delayed, on the CPU only if this rank `sleeps`.

    Raises RuntimeError for a torch that cannot keep a stream busy.
    """
    if device.type == "cpu":
        return DispatchTap([], before=[_Delay(kinds, _sleep if sleeps else _do_nothing).listen])
    if not hasattr(torch.cuda, "_sleep"):
        raise RuntimeError(f"torch {torch.__version__} has no torch.cuda._sleep: see conformance/instruments/delays.py")
    return DispatchTap([], before=[_Delay(kinds, lambda: _occupy(device)).listen])


class _Delay:
    def __init__(self, kinds: Sequence[str], delay: Callable[[], None]) -> None:
        self._choices = {kind: _choices(kind) for kind in kinds}
        self._delay = delay

    def listen(self, func: Any) -> EarlyHandler:
        return partial(self._before, func)

    def _before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        kind = _kind(func, args, kwargs)
        if kind in self._choices and next(self._choices[kind]):
            self._delay()


def _choices(kind: str) -> Iterator[bool]:
    """Yield, for each operator of a kind, whether to delay it."""
    yield True
    generator = random.Random(kind)
    while True:
        yield generator.randrange(EVERY) == 0


def _kind(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    name = str(func._schema.name)
    if name in TRANSFERS:
        return "transfer"
    if func.namespace in NAMESPACES:
        return collective_kind(name)
    if name in _COPIES and len(set(_device_types(args, kwargs))) > 1:
        return "copy"
    return None


def _device_types(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the types of devices between which a copy moves: `Tensor.to` names its target, `copy_` has a tensor there.

    `aten::_to_copy(Tensor self, *, ..., Device? device=None, ...)`.
    """
    yield from (argument.device.type for argument in args if isinstance(argument, torch.Tensor))
    if kwargs.get("device") is not None:
        yield torch.device(kwargs["device"]).type


def _do_nothing() -> None:
    """Delay nothing: on the CPU one rank alone sleeps."""


def _sleep() -> None:
    time.sleep(DELAY_S)


def keep_busy(cycles: int) -> None:
    """Keep the current stream of the current CUDA device busy for a number of cycles of its clock."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _occupy(device: torch.device) -> None:
    keep_busy(CYCLES)
    for _ in range(_BLOCKS):
        torch.full((_BLOCK_NUMEL,), torch.nan, device=device)
