"""Trace of the simulated device: the work that the host issued, in order, for the check of happens-before."""

from typing import NamedTuple

Bytes = tuple[int, int, int]
"""Block, first byte and the byte behind the last, counted from the begin of the block.

Blocks of the device have positive numbers; they are whole segments of the caching allocator, so that memory that is
handed out again keeps its place. Blocks of pinned host memory have negative ones."""


class Access(NamedTuple):
    """Operator, or event, as the host issued it.

    Kinds: `op` (an operator, copy or collective is queued on `stream`), `record` and `wait` (of `event`, by a stream),
    `host_wait_event`, `host_wait_stream`, `host_wait_read` (for a number, or a copy in pageable memory),
    `host_wait_device` (for each stream of a device), `query` (the host asks whether a stream, or an event, is done),
    `host` (the host uses pinned memory), `stream` (is created; `event` is the number of its device), `alloc`,
    `alloc_pinned` (when no stream uses the block any longer), `record_stream`, `free_later` (freed, once the streams of
    record_stream have finished) and `free` (the memory may be handed out again).
    """

    kind: str
    stream: int
    name: str
    """Operator, such as `aten::add.Tensor`, `copy_device_to_pinned` or `all_gather`."""
    event: int
    """Number of the event; each `record` has a new one."""
    reads: tuple[Bytes, ...]
    writes: tuple[Bytes, ...]
    """Bytes that an operator writes, or the block that is allocated or freed."""
    number: int = 0
    """Number of an operator in the process, from 1; 0 for all else."""
    site: int = 0
    """Number of the place in the program, from 1; 0 unless sites are looked up, see `recording`."""
