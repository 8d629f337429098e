"""Recorded run of one process: its trace, the execution of the device, and the bits that came out, as a file.

Nothing here imports torch.
"""

from pathlib import Path

import msgspec

from conformance.sim.trace import Access


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Line of a Python file."""

    file: str
    line: int
    function: str


class Site(msgspec.Struct, frozen=True, array_like=True):
    """Origin of an entry of the trace in the program."""

    program: Place | None
    """Innermost frame outside of torch, of the standard library and of this suite. An operator that a thread of
    autograd issues has the line that the main thread is at."""
    torch: Place | None
    """Innermost frame inside of torch."""
    node: str
    """Node of autograd that was running, such as `MmBackward0`; otherwise empty."""


class Read(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that the host got from the device."""

    number: int
    """Number of the operator in the trace."""
    digest: int


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Device memory that was in use at the end."""

    number: int
    """Number of the allocation in the trace, from 1."""
    size_bytes: int
    digest: int


class Recorded(msgspec.Struct, frozen=True):
    """Run of a process with the simulated device, as it ended."""

    trace: list[Access]
    sites: list[Site]
    order: list[int]
    """Numbers of the operators in the order in which they ran."""
    reads: list[Read]
    blocks: list[Block]
    failure: str = ""
    """Message of the operator that failed after the last line of the program; otherwise empty."""


STARTED, ENDED = ".started", ".msgpack"
"""Suffixes of the empty file of a process that records, and of the file of one that came to its end."""


def write(file: Path, recorded: Recorded) -> None:
    """Write a run; the file appears when it is complete."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_bytes(msgspec.msgpack.encode(recorded))
    unfinished.rename(file)


def read(file: Path) -> Recorded:
    """Return the run in a file."""
    return msgspec.msgpack.decode(file.read_bytes(), type=Recorded)
