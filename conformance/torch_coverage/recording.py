"""Measurement in a rank while an experiment runs: coverage.py's tracer, which also tells of each call.

Lines are traced in torch's files alone. A dynamic context of coverage.py is a function that is asked at each call of
any Python function: here it looks for calls of torch's interfaces and names no context. So nothing of torch is
replaced, and no frame but those of interfaces is looked into.
"""

import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
import torch
from torch import Tensor

from conformance.torch_coverage.areas import area_of_files, torch_directory
from conformance.torch_coverage.interfaces import Interface, described, interfaces, is_default
from conformance.torch_coverage.seen import SEEN_FILES, Seen


@contextmanager
def recording(directory: Path, device: torch.device) -> Iterator[None]:
    """Write the lines and calls of torch in the context to a file of a record; after an exception, write nothing."""
    import coverage  # an extra of the package, see `require_coverage`

    calls = _Calls({interface.code: interface for interface in interfaces()})
    root = torch_directory()
    tracer = coverage.Coverage(
        data_file=None,
        config_file=False,
        branch=True,
        include=[str(root / file) for file in area_of_files()],
        plugins=[lambda registry, _options=None: registry.add_dynamic_context(calls)],
    )
    tracer.start()
    try:
        _trace_backward(device)
        yield
    finally:
        tracer.stop()
    data = tracer.get_data()
    seen = Seen(torch=str(torch.__version__), values=calls.values, pairs=calls.pairs)
    for file in data.measured_files():
        seen.jumps[Path(file).relative_to(root).as_posix()] = set(data.arcs(file) or ())
    (directory / SEEN_FILES.replace("*", uuid.uuid4().hex)).write_bytes(msgspec.msgpack.encode(seen))


class _Calls:
    """Plugin of coverage.py, a dynamic context, that notes arguments of torch's interfaces."""

    def __init__(self, known: Mapping[CodeType, Interface]) -> None:
        self.values: dict[str, dict[str, set[str]]] = {}
        self.pairs: dict[str, set[tuple[str, str]]] = {}
        self._known = known

    def dynamic_context(self, frame: FrameType) -> None:
        """Note the arguments of a call whose frame begins; coverage.py asks for the name of a context, and gets none.

        The locals of the frame are arguments then. Python 3.11 keeps the dictionary in the frame, which would let
        tensors live longer than without the measurement, so it is emptied: the frame has the variables elsewhere.
        """
        interface = self._known.get(frame.f_code)
        if interface is None:
            return
        arguments = frame.f_locals
        try:
            self._note(interface, arguments)
        finally:
            if type(arguments) is dict:
                arguments.clear()

    def _note(self, interface: Interface, arguments: Mapping[str, Any]) -> None:
        values = self.values.setdefault(interface.name, {})
        given = []
        for parameter in interface.parameters:
            value = arguments.get(parameter.name, parameter.default)
            if not is_default(value, parameter.default):
                values.setdefault(parameter.name, set()).add(described(value))
                given += [parameter.name] if parameter.has_default else []
        pairs = self.pairs.setdefault(interface.name, set())
        pairs.update((one, other) for one in given for other in given if one < other)


def _trace_backward(device: torch.device) -> None:
    """Trace the thread in which autograd computes backward for a device, too.

    On the CPU backward runs in the thread that asks for it. For a device it has a thread of C++, which Python's
    `threading` does not know: a hook on a tensor, called in that thread, installs the tracer that coverage.py gives to
    threads of Python. The thread keeps its state of Python until the process ends.
    """
    if device.type == "cpu":
        return
    x = torch.ones(1, device=device, requires_grad=True)
    x.register_hook(_trace_thread)  # type: ignore[no-untyped-call]
    torch.autograd.backward(x.sum())
    del x
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()


def _trace_thread(_gradient: Tensor) -> None:
    if threading.current_thread() is not threading.main_thread():
        sys.settrace(threading.gettrace())
