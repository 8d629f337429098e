"""Tensors without memory, and a ledger of the memory that real ones would take.

In torch's FakeTensorMode a tensor has shape, dtype, device and a storage of the right size without a byte in it, and
operators compute nothing else: a step of any model takes seconds. The ledger sees storages: a storage is allocated by
the operator whose result lies in it while no argument does, and held until no tensor lies in it any more, or until it
is resized, as FSDP does with unsharded parameters. The ledger does not see what a kernel allocates and frees inside of
itself.

torch.distributed._tools.fsdp2_mem_tracker sees no more, looks into more private state of FSDP2, and refuses modules
of several parameter groups and a second step.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from conformance.instruments.dispatch_tap import DispatchTap
from conformance.instruments.memory import MARK, MemoryLedger, Report


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Open a context in which tensors have no memory, and a number that is read from a tensor is 1.

    Tensors that were made before are taken as if they had no memory. A device mesh has to be made before. Raises
    RuntimeError for a torch without FakeTensorMode.
    """
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError as error:
        raise RuntimeError(f"torch {torch.__version__} has no FakeTensorMode: {error}") from None
    with FakeTensorMode(allow_non_fake_inputs=True), _Substitutes():
        yield


@contextmanager
def fake_memory_ledger() -> Iterator[MemoryLedger]:
    """Open a ledger like `memory.memory_ledger` inside of `fake_tensors`.

    Raises RuntimeError if no operator has allocated anything.
    """
    ledger, storages = MemoryLedger(), _Storages()
    gc.collect()  # so that garbage in cycles is not released into the ledger
    with patch.object(torch.UntypedStorage, "resize_", storages.watched(torch.UntypedStorage.resize_)), storages:
        yield ledger
    if all(isinstance(report, str) for report in storages.reports):
        raise RuntimeError("no operator has allocated anything: this torch does not show its fake tensors")
    ledger.add_up(storages.reports, mapped_bytes=())


class _Tap(DispatchTap):  # type: ignore[no-untyped-call]
    """Dispatch tap that sees the operators on plain and fake tensors, also inside of DTensor and other wrappers."""

    def __init__(self) -> None:
        super().__init__(())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # by far the most calls, and this is all that they do
            return args[0].fake_device
        # Let wrappers unwrap themselves first: their inner operators come back here.
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class _Substitutes(_Tap):  # type: ignore[no-untyped-call]
    """Substitutes for operators that fake tensors do not support, or compute differently from real tensors."""

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # the fake one would return a copy
        return func(*args, **kwargs)


class _Storages(_Tap):  # type: ignore[no-untyped-call]
    """Reports of the allocation and release of each storage, as if all had different addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[Report] = []
        self._held: dict[int, tuple[Report, weakref.ref[Any]]] = {}
        """Release report of each storage, and the weak reference that triggers it, by id."""
        self._next_address = 0

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], str) and args[0].startswith(MARK):
            self.reports.append(args[0].removeprefix(MARK))
        argument_storages = {id(tensor.untyped_storage()) for tensor in _tensors([args, kwargs])}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in argument_storages and id(storage) not in self._held:
                self._allocated(storage)
        return result

    def watched(self, resize: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        """Return a `resize` of storages that is reported as a reallocation: the tap sees operators only."""

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            before = self._held.pop(id(storage), None)
            result = resize(storage, nbytes)
            self._allocated(storage)
            if before:
                self.reports.append(before[0])
            return result

        return resize_

    def _allocated(self, storage: torch.UntypedStorage) -> None:
        key, address, nbytes = id(storage), self._next_address, storage.nbytes()
        if not nbytes:
            return
        self._next_address += nbytes
        self.reports.append((address, nbytes))
        self._held[key] = (address, -nbytes), weakref.ref(storage, lambda _: self._released(key))

    def _released(self, key: int) -> None:
        report, _ = self._held.pop(key)
        self.reports.append(report)


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested sequences and dictionaries."""
    match value:
        case Tensor():
            yield value
        case list() | tuple():
            for item in value:
                yield from _tensors(item)
        case dict():
            yield from _tensors(list(value.values()))
