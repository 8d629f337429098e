"""Traces of torch's profiler: the fields that instruments read of each event, in the format of Chrome's traces."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec


class MemoryChange(msgspec.Struct):
    """Arguments of an event named `MEMORY`; those of other events have none of these fields."""

    address: int = msgspec.field(name="Addr", default=0)
    change_bytes: int = msgspec.field(name="Bytes", default=0)
    device_type: int = msgspec.field(name="Device Type", default=-1)
    """Kind of device, as `c10::DeviceType` numbers them."""


class Span(msgspec.Struct):
    """Event of a trace; an event that lasts (`ph` is X) has all of these fields, times in microseconds.

    One that is named `MEMORY` reports a change in `args`.
    """

    name: str = ""
    cat: str = ""
    ph: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0
    args: MemoryChange = msgspec.field(default_factory=MemoryChange)


class _Trace(msgspec.Struct):
    traceEvents: list[Span]  # noqa: N815 - the format's name


MEMORY = "[memory]"
"""Name of the events that report an allocation or a release."""


def read_trace(export: Callable[[str], object]) -> list[Span]:
    """Return the events of a trace that `export` writes to a file."""
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "trace.json")
        export(str(trace))
        return msgspec.json.decode(trace.read_bytes(), type=_Trace).traceEvents
