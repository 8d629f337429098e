"""Work that keeps a stream of a device busy, and its memory as the allocator counts it."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from conformance.instruments.delays import keep_busy

MIB = 1 << 20
_BUSY_CYCLES = 200_000_000
"""Time for which a GPU is kept busy, in cycles of its clock: some 100 ms."""


def new_stream(device: torch.device) -> torch.Stream:
    """Return another stream of the device."""
    return torch.Stream(device=device)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream on which this thread issues."""
    return torch.accelerator.current_stream(device)


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """Open a context in which operators are issued on a stream."""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def occupy(stream: torch.Stream, *, times: int = 1) -> None:
    """Keep a stream busy: a GPU for a tenth of a second, the simulated device until something waits for the stream.

    The schedule of the simulated device has to be `lazy`. A driver may wait for busy streams when it takes memory, so
    that a probe takes the memory of later operators before.
    """
    with on(stream):
        if stream.device.type == "cuda":
            keep_busy(times * _BUSY_CYCLES)
        else:
            torch.zeros((), device=stream.device)


def waits(device: torch.device, action: Callable[[], object]) -> bool:
    """Return whether the host waits for the current stream in an action.

    The action is called twice: its first call may load kernels, and takes memory that is in the cache then.
    """
    stream = current_stream(device)
    action()
    stream.synchronize()
    occupy(stream)
    action()
    waited = stream.query()
    stream.synchronize()
    return waited


@contextmanager
def settled(device: torch.device) -> Iterator[torch.Stream]:
    """Open a context on a stream that is current, with nothing queued on the device and no cached memory."""
    release_cached(device)
    stream = new_stream(device)
    with on(stream):
        yield stream
    torch.accelerator.synchronize(device)


def release_cached(device: torch.device) -> None:
    """Wait for the device, and give back all cached memory."""
    gc.collect()
    torch.accelerator.synchronize(device)
    torch.accelerator.empty_cache()


def taken(device: torch.device, size_bytes: int) -> Tensor:
    """Return a block of memory, by the current stream."""
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def count(device: torch.device, statistic: str, *, over: str = "current") -> int:
    """Return a statistic of the allocator, such as `allocated_bytes`."""
    return int(torch.accelerator.memory_stats(device)[f"{statistic}.all.{over}"])


def growth(device: torch.device, statistic: str, action: Callable[[], object]) -> int:
    """Return by how much an action, whose result lives until then, raises a statistic of the allocator."""
    before = count(device, statistic)
    result = action()
    after = count(device, statistic)
    del result
    return after - before


def peak_growth(device: torch.device, action: Callable[[], object]) -> int:
    """Return by how much allocated bytes rise at most during an action."""
    torch.accelerator.reset_peak_memory_stats(device)
    before = count(device, "allocated_bytes")
    result = action()
    peak = count(device, "allocated_bytes", over="peak")
    del result
    return peak - before
