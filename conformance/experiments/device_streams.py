"""Trace of streams on the simulated device: its commands, and the host's uses of pinned memory.

The device records all operators, copies, collectives, events and uses of its allocator itself; the host's own operators
on pinned memory are seen by the dispatch tap. Its entries do not name their issuer: each dispatched
operator marks the length of the trace, so that an entry belongs to the operator whose mark follows it.
"""

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from conformance.experiments.device_entries import entries_of
from conformance.instruments.accesses import accessed_tensors, byte_range
from conformance.instruments.dispatch_tap import OutcomeHandler
from conformance.instruments.facts import StreamFacts
from conformance.instruments.happens_before import HOST
from conformance.instruments.streams import Site, TracedStep, assigned_name, site_of, stream_facts
from conformance.sim import device as simulated
from conformance.sim.trace import Access as Noted


class DeviceStreamTrace(TracedStep):
    """Trace of a step on the simulated device."""

    def __init__(self, step: int, *, reads_order: bool = False) -> None:
        """Trace a step; with `reads_order` the host's waits order its later work, see `entries_of`."""
        super().__init__(step)
        self._reads_order = reads_order
        self._unseen: list[tuple[int, int]] = []
        self._first: int | None = None
        """Length of the trace when the step began; earlier entries of the allocator count, too."""
        self._marks: list[int] = []
        self._sites: list[Site] = []
        self._names = {0: "default stream", HOST: "host"}
        self._noted: list[Noted] = []

    def open(self) -> None:
        """Begin to trace, unless that has begun."""
        super().open()
        if self._first is None:
            self._first = simulated.trace_size()

    def end(self) -> None:
        """Trace no more."""
        if self._is_open:
            self._noted = simulated.stop_trace()
        super().end()

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Open a context for operators of instruments: the host's waits in it order nothing."""
        begin = simulated.trace_size()
        try:
            yield
        finally:
            self._unseen.append((begin, simulated.trace_size()))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Open the context of a run: the device records its commands, and FSDP's streams have descriptive names."""
        module = torch.get_device_module(simulated.NAME)
        new_stream: Callable[..., torch.Stream] = module.Stream

        def named(*args: Any, **options: Any) -> torch.Stream:
            stream = new_stream(*args, **options)
            self._names[stream.stream_id] = assigned_name(sys._getframe(1)) or "unnamed stream"
            return stream

        simulated.start_trace()
        try:
            with patch.object(module, "Stream", named):
                yield
        finally:
            self.end()

    def listen(self, func: Any) -> OutcomeHandler:
        """Return the handler that marks the calls of an operator, and records their uses of pinned memory."""
        accessed = accessed_tensors(func)

        def mark(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
            if not self._is_open:
                return
            if accessed:
                _note_host(accessed.operator, accessed.arguments(args, kwargs))
            self._marks.append(simulated.trace_size())
            self._sites.append(site_of(sys._getframe(1).f_back))  # in a thread of autograd the tap has no caller

        return mark

    def busy_streams(self) -> list[int]:
        """Return the ids of the streams that worked in the traced step. Must be called before `facts`."""
        return sorted({entry.stream for entry in self._noted[self._first or 0 :] if entry.kind == "op"})

    def facts(self) -> StreamFacts:
        """Return the findings of the trace, and clear it."""
        for begin, end in self._unseen:
            self._noted[begin:end] = [_without_wait(entry) for entry in self._noted[begin:end]]
        entries = entries_of(self._noted, first=self._first or 0, site=self._site, reads_order=self._reads_order)
        streams = {entry.stream for entry in self._noted}
        names = {stream: self._names.get(stream, f"stream {stream}") for stream in streams | {HOST}}
        self._noted, self._marks, self._sites = [], [], []
        return stream_facts(entries, names)

    def _site(self, position: int) -> Site | None:
        """Return where the entry at a position of the trace was issued: by the operator whose mark is behind it."""
        index = bisect_right(self._marks, position)
        return self._sites[index] if index < len(self._sites) else None


def _without_wait(noted: Noted) -> Noted:
    return noted._replace(kind="unseen") if noted.kind.startswith("host_wait") else noted


def _note_host(operator: str, accesses: Sequence[tuple[Tensor, bool]]) -> None:
    """Note the accesses of an operator that runs on the host: one with a tensor on the device runs there."""
    if all(tensor.is_cpu for tensor, _ in accesses):
        for tensor, writes in accesses:
            start, stop = byte_range(tensor)
            address = tensor.untyped_storage().data_ptr() + start
            simulated.host_access(operator, address, stop - start, write=writes)
