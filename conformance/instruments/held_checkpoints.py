"""Asynchronous checkpoints whose writing is postponed, so that changes by training in between would show."""

from pathlib import Path
from threading import Event
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from reference_trainer.checkpoint import Checkpoints


class HeldCheckpoints(Checkpoints):
    """Asynchronous checkpoints of the public API, whose writing thread waits until `release`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, asynchronous=True)
        self._released = Event()

    def release(self) -> None:
        """Let the writing begin."""
        self._released.set()

    def storage(self, directory: Path) -> FileSystemWriter:
        """Return the writer of a checkpoint, which waits for `release`."""
        return _HeldWriter(directory, self._released)


class _HeldWriter(FileSystemWriter):
    def __init__(self, directory: Path, released: Event) -> None:
        super().__init__(directory)
        self._released = released

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        self._released.wait()
        return super().write_data(*args, **kwargs)
