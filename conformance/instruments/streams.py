"""Trace of streams on the CPU: operators with the memory that they access, and the events that order them.

FSDP2 issues the same streams, events and waits on every device, through the module of its mesh's device. On the CPU
that is `torch.cpu`, whose streams do nothing: everything runs at once, in the order of issue. The trace has the
sequence that a device would get; `happens_before.py` finds accesses that some timing of its streams could run in the
wrong order.

Every storage carries a unique number as an attribute. Its address, or that of its C++ object, would not be unique: both
are reused for other storages, on other streams.

A collective counts as an operator of the stream on which it was issued, as ProcessGroupNCCL runs synchronous ones since
torch 2.8 (https://github.com/pytorch/pytorch/pull/150398). Reading a value (`item()`) orders nothing here, although it
would on a device: FSDP's own events must suffice.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from conformance.instruments.accesses import (
    AccessedTensors,
    accessed_tensors,
    byte_range,
    identify,
    identity_of,
    require_identities,
)
from conformance.instruments.assignments import assigned_in
from conformance.instruments.dispatch_tap import OutcomeHandler
from conformance.instruments.facts import IssuedOperator, StreamFacts, UnorderedOperators
from conformance.instruments.happens_before import (
    Access,
    Allocation,
    Entry,
    HostSynchronize,
    HostWait,
    Operation,
    Race,
    Record,
    Wait,
    races,
)
from reference_trainer.observer import Observer, Phase

_FRAMES = 8
"""Number of innermost frames that are kept of where an operator was issued."""
_numbers = itertools.count(1)
"""Numbers of events and storages; a storage that outlives its trace has a number that no later trace uses."""
_PLUMBING = ("torch/_ops.py", "torch/utils/_contextlib.py", "torch/nn/modules/module.py", "torch/_compile.py")
"""Files whose frames do not belong to the call site of an operator."""
Site = list[Any]
"""Code and instruction of each of the innermost frames in turn, innermost first.

One object for the garbage collector. The line of an instruction is looked up for the few sites that a reader sees:
a frame decodes its line table for `f_lineno`, once for each operator of a step."""


class Stream:
    """Recording stub of `torch.cuda.Stream`, with the methods that FSDP calls."""

    def __init__(self, trace: "StreamTrace", number: int, name: str) -> None:
        self._trace, self.number, self.name = trace, number, name

    def wait_event(self, event: "Event") -> None:
        """Order all later work on this stream after the event."""
        self._trace.add(Wait(event.number, self.number))

    def wait_stream(self, stream: "Stream") -> None:
        """Order all later work on this stream after all earlier work on `stream`."""
        self.wait_event(stream.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event, a new one unless it is given; returns the event."""
        event = event or self._trace.event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Order all later work of the host after all earlier work on this stream."""
        self._trace.add(HostSynchronize(self.number))

    def query(self) -> bool:
        """Always True: a recorded run has finished."""
        return True


class Event:
    """Recording stub of `torch.cuda.Event`, with the methods that FSDP calls."""

    def __init__(self, trace: "StreamTrace", number: int) -> None:
        self._trace, self.number = trace, number

    def record(self, stream: Stream | None = None) -> None:
        """Mark the current end of the stream, by default of the current one."""
        self._trace.add(Record(self.number, (stream or self._trace.current).number))

    def wait(self, stream: Stream | None = None) -> None:
        """Order all later work on the stream, by default the current one, after the event."""
        (stream or self._trace.current).wait_event(self)

    def synchronize(self) -> None:
        """Order all later work of the host after the event."""
        self._trace.add(HostWait(self.number))

    def query(self) -> bool:
        """Always True: a recorded run has finished."""
        return True


class TracedStep(Observer):
    """Trace of one training step, and of the optimizer step before it, whose results the step gathers.

    Leaves `streams` of `facts.RankFacts`. Subclasses say how a device is traced.
    """

    def __init__(self, step: int) -> None:
        self._step, self._is_open = step, False

    def phase(self, name: Phase, *, step: int) -> None:
        """Open and close the trace."""
        if (name, step) in (("optimizer", self._step - 1), ("data", self._step)):
            self.open()
        elif (name, step) == ("idle", self._step):
            self.end()

    def open(self) -> None:
        """Start the trace unless it is open."""
        self._is_open = True

    def end(self) -> None:
        """Stop the trace."""
        self._is_open = False

    def installed(self) -> AbstractContextManager[None]:
        """Return the context for the whole run."""
        raise NotImplementedError

    def listen(self, func: Any) -> OutcomeHandler | None:
        """Return the handler of an operator's calls, as a listener of a `DispatchTap` for outcomes."""
        raise NotImplementedError

    def facts(self) -> StreamFacts:
        """Return the traced step, and clear the trace."""
        raise NotImplementedError


class StreamTrace(TracedStep):
    """Trace of a step on the CPU."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.entries: list[Entry] = []
        self._streams = [Stream(self, 0, "default stream")]
        self.current = self._streams[0]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Open a context in which `torch.cpu` has recording stubs of streams and events.

        Raises RuntimeError for a torch in which a storage does not keep its attributes.
        """
        require_identities()
        replacements = {
            "Stream": self._new_stream,
            "Event": self.event,
            "stream": self._on_stream,
            "current_stream": lambda device=None: self.current,
            "synchronize": lambda device=None: self.add(HostSynchronize(None)),
        }
        with ExitStack() as stack:
            for name, replacement in replacements.items():
                stack.enter_context(patch.object(torch.cpu, name, replacement))
            # FSDP asks for it, whatever its device, where it waits for an all-gather that no module has waited for.
            stack.enter_context(patch.object(torch.accelerator, "current_stream", replacements["current_stream"]))
            yield

    def add(self, entry: Entry) -> None:
        """Add an action of the host to the trace."""
        if self._is_open:
            self.entries.append(entry)

    def event(self, **_options: Any) -> Event:
        """Return a new event."""
        return Event(self, next(_numbers))

    def _new_stream(self, priority: int = 0, **_options: Any) -> Stream:
        self._streams.append(Stream(self, len(self._streams), assigned_name(sys._getframe(1)) or "unnamed stream"))
        return self._streams[-1]

    @contextmanager
    def _on_stream(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def listen(self, func: Any) -> OutcomeHandler | None:
        """Return the handler that notes the calls of an operator; None for one that accesses nothing, such as a view.

        The handler is a listener of a `DispatchTap` for outcomes.
        """
        accessed = accessed_tensors(func)
        if accessed is None:
            return None

        def note(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
            if self._is_open:
                self._note(accessed, args, kwargs, result)

        return note

    def _note(self, accessed: AccessedTensors, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        stream = self.current.number
        accesses = [self._access(tensor, writes) for tensor, writes in accessed.arguments(args, kwargs)]
        for tensor in accessed.results(result):
            if identity_of(tensor) is None:
                number = self._identify(tensor)
                self.entries.append(Allocation(number, stream))
                if accessed.initializes:
                    accesses.append(self._access(tensor, writes=True))
        if accesses:
            self.entries.append(Operation(stream, accessed.operator, accesses, site_of(sys._getframe(3))))

    def _access(self, tensor: Tensor, writes: bool) -> Access:
        start, stop = byte_range(tensor)
        return Access(identity_of(tensor) or self._identify(tensor), start, stop, writes)

    def _identify(self, tensor: Tensor) -> int:
        number = next(_numbers)
        identify(tensor, number, self.entries)
        return number

    def facts(self) -> StreamFacts:
        """Return the traced step, and clear the trace."""
        entries = [*self.entries]
        self.entries.clear()  # storages that still live hold the list
        return stream_facts(entries, {stream.number: stream.name for stream in self._streams})


def stream_facts(entries: Sequence[Entry], names: Mapping[int, str]) -> StreamFacts:
    """Return the traced step with its races; `names` are the names of streams by number."""
    return StreamFacts(
        operators=dict(Counter(names[entry.stream] for entry in entries if isinstance(entry, Operation))),
        waits=sum(isinstance(entry, Wait) for entry in entries),
        unordered=[_unordered(race, names) for race in races(entries)],
    )


def _unordered(race: Race, names: Mapping[int, str]) -> UnorderedOperators:
    first, second = (
        IssuedOperator(operation.operator, names[operation.stream], _readable(operation.site or []))
        for operation in (race.first, race.second)
    )
    return UnorderedOperators(first, second, race.reused)


def site_of(frame: FrameType | None) -> Site:
    """Return the call site of an operator, given the frame of its handler."""
    site: Site = []
    for _ in range(_FRAMES):
        if frame is None:
            break
        site += (frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return site


def _readable(site: Site) -> list[str]:
    """Return `FILE:LINE FUNCTION` of each frame; files are named from the directory that they are imported from."""
    frames = [
        (_imported_from(code.co_filename), _line(code, instruction), code.co_name)
        for code, instruction in zip(site[::2], site[1::2], strict=True)
    ]
    return [f"{file}:{line} {function}" for file, line, function in frames if file not in _PLUMBING]


def _line(code: CodeType, instruction: int) -> int | None:
    return next((line for start, stop, line in code.co_lines() if start <= instruction < stop), None)


def _imported_from(file: str) -> str:
    parents = [path for path in sys.path if path and Path(file).is_relative_to(path)]
    return str(Path(file).relative_to(max(parents, key=len))) if parents else file


def assigned_name(frame: FrameType) -> str | None:
    """Return the variable or attribute that the running line assigns to: FSDP's streams have telling names."""
    return assigned_in(frame.f_code.co_filename, frame.f_lineno)
