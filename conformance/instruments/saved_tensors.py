"""Ledger of the storages that autograd saves for backward, told by `torch.autograd.graph.saved_tensors_hooks`.

A storage counts from the operator that saves a tensor in it until nothing refers to it. Parameters and buffers, which
autograd saves as well, are to be left out. A hook of the model's own, as of activation checkpointing, takes the
ledger's place: tensors that it packs are not seen.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from conformance.instruments.dispatch_tap import plain_tensors


class SavedTensors:
    """Bytes of the storages that autograd has saved and that are still alive; see the module."""

    def __init__(self) -> None:
        self.held_bytes = 0
        """Bytes that are saved at present."""
        self.is_on = True
        """True while tensors that are saved count."""
        self._left_out: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._saved: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Open a context in which the ledger learns of saved tensors."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unchanged):
            yield

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Let the storages of parameters or buffers, plain tensors or DTensors, not count."""
        for storage in _storages(tensors):
            key = id(storage)  # Python's object lives as long as the memory, whoever refers to it
            self._left_out[key] = weakref.ref(storage, lambda _, key=key: self._left_out.pop(key))  # type: ignore[misc]

    def _pack(self, tensor: Tensor) -> Tensor:
        for storage in _storages([tensor]) if self.is_on else ():
            if id(storage) not in self._left_out and id(storage) not in self._saved:
                self._add(storage, id(storage), storage.nbytes())
        return tensor

    def _add(self, storage: torch.UntypedStorage, key: int, nbytes: int) -> None:
        self.held_bytes += nbytes
        self._saved[key] = weakref.ref(storage, lambda _: self._forget(key, nbytes))

    def _forget(self, key: int, nbytes: int) -> None:
        self.held_bytes -= nbytes
        del self._saved[key]


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    return (plain.untyped_storage() for tensor in tensors for plain in plain_tensors(tensor))


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
