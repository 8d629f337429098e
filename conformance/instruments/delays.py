"""Delays before collectives and copies: what a stream, or a rank, is late with must not be used before it is there.

On a device the stream that issues the operator is kept busy (`torch.cuda._sleep`, which is not public: nothing else
keeps a stream busy without a kernel of one's own), so that all that does not wait for it runs ahead; and freed memory
is handed out again and filled with NaN meanwhile. On the CPU the last rank sleeps, and its peers are ahead.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from conformance.instruments.collectives import collective_kind
from conformance.instruments.dispatch_tap import DispatchTap

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "copy")
"""`copy`: between device and host."""
DELAY_S = 0.02
CYCLES = 20_000_000
"""Of the device's clock: some 10 ms."""
EVERY = 8
"""Of the operators of a kind one in so many is delayed, the first among them. They are drawn, from the same seed each
time: every eighth would be the same one in each step that has eight.
"""
_BLOCKS, _BLOCK_NUMEL = 32, 1 << 16
_COPIES = ("aten::_to_copy", "aten::copy_")


def delays(kinds: Sequence[str], *, device: torch.device, is_last: bool) -> DispatchTap:
    """The context in which operators of these kinds are late.

    Raises RuntimeError for a torch that cannot keep a stream busy.
    """
    if device.type == "cpu":
        return DispatchTap([], before=[_Delay(kinds, _sleep if is_last else _go_on).listen])
    if not hasattr(torch.cuda, "_sleep"):
        raise RuntimeError(f"torch {torch.__version__} has no torch.cuda._sleep: see conformance/instruments/delays.py")
    return DispatchTap([], before=[_Delay(kinds, lambda: _occupy(device)).listen])


class _Delay:
    def __init__(self, kinds: Sequence[str], delay: Callable[[], None]) -> None:
        self._draws = {kind: _draws(kind) for kind in kinds}
        self._delay = delay

    def listen(self, func: Any, args: Sequence[Any]) -> None:
        kind = _kind(func, args)
        if kind in self._draws and next(self._draws[kind]):
            self._delay()


def _draws(kind: str) -> Iterator[bool]:
    """Whether to delay the next operator of a kind."""
    yield True
    draw = random.Random(kind)
    while True:
        yield draw.randrange(EVERY) == 0


def _kind(func: Any, args: Sequence[Any]) -> str | None:
    name = str(func._schema.name)
    if func.namespace in ("c10d", "_c10d_functional"):
        return collective_kind(name)
    if name in _COPIES and len({arg.device.type for arg in args if isinstance(arg, torch.Tensor)}) > 1:
        return "copy"
    return None


def _go_on() -> None:
    """The other ranks are in time."""


def _sleep() -> None:
    time.sleep(DELAY_S)


def _occupy(device: torch.device) -> None:
    torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
    for _ in range(_BLOCKS):
        torch.full((_BLOCK_NUMEL,), torch.nan, device=device)
