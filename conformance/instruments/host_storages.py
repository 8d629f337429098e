"""Ledger of the storages that a run on the CPU holds, told by a dispatch tap: the host's counterpart of an allocator.

A storage counts from the operator that returns it until nothing refers to it. Memory inside of an operator, that of
process groups, of compiled graphs, of mapped files and of NumPy's arrays is not seen, so that a ledger may tell too
little, never too much. FSDP2 frees and allocates its buffers with the public `torch.UntypedStorage.resize_`, which no
dispatch mode sees.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from conformance.instruments.dispatch_tap import OutcomeHandler

_PLAIN = (Tensor, torch.nn.Parameter)


class HostStorages:
    """Bytes of the storages that operators have returned and that are still alive; see the module."""

    def __init__(self) -> None:
        self.held_bytes = 0
        """Bytes that are held at present."""
        self.peak_bytes = 0
        """Largest value of `held_bytes` since `reset_peak`."""
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Open a context in which the ledger learns of storages that are resized."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = original(storage, nbytes)
            self._measure(storage)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resize):
            yield

    def listen_to_outcomes(self, func: Any) -> OutcomeHandler:
        """Return the handler that notes new storages; to be a listener of the outcomes of a `DispatchTap`."""
        return self._note

    def reset_peak(self) -> None:
        """Make the bytes held at present the peak."""
        self.peak_bytes = self.held_bytes

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage counts."""
        return id(storage) in self._sizes

    def _note(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if self.owns(storage):
                self._measure(storage)
            elif all(storage is not each.untyped_storage() for each in _tensors((args, tuple(kwargs.values())))):
                self._add(storage)  # a storage of an argument that does not count is older than the ledger

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # Python's object lives as long as the memory, whoever refers to it
        self._sizes[key] = 0
        self._references[key] = weakref.ref(storage, lambda _reference: self._forget(key))
        self._measure(storage)

    def _measure(self, storage: torch.UntypedStorage) -> None:
        known_bytes = self._sizes.get(id(storage))
        if known_bytes is None:
            return
        self._sizes[id(storage)] = storage.nbytes()
        self.held_bytes += storage.nbytes() - known_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _forget(self, key: int) -> None:
        self.held_bytes -= self._sizes.pop(key)
        del self._references[key]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the plain, dense tensors on the CPU in a value."""
    if isinstance(value, Tensor):
        if type(value) in _PLAIN and value.device.type == "cpu" and value.layout == torch.strided:
            yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
