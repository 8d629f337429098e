"""Extension of torch.distributed.checkpoint that inverts every bit of the files.

The classes of extensions are in a private module of torch, which is imported here alone.
"""

import io
from typing import Any, cast

import torch

try:
    from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
except ImportError:  # torch 2.6, on whose CPU no law that saves runs; laws must be importable there
    ExtensionRegistry = None  # type: ignore[assignment, misc]
    StreamTransformExtension = object  # type: ignore[assignment, misc]


class _InvertedWriter(io.RawIOBase):
    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._raw.write(_inverted(bytes(data)))
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class _InvertedReader(io.RawIOBase):
    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._raw.read(len(buffer))
        buffer[: len(data)] = _inverted(data)
        return len(data)


class Inverting(StreamTransformExtension):
    """Extension that inverts every bit of a stream."""

    @staticmethod
    def from_descriptor(_version: str) -> "Inverting":
        """Return the extension that a checkpoint names."""
        return Inverting()

    @staticmethod
    def registry_name() -> str:
        """Return the name by which readers find the class."""
        return "stream.inverting"

    def get_descriptor(self) -> str:
        """Return the description of the extension in a checkpoint."""
        return f"{self.registry_name()}/1"

    def transform_to(self, output: Any) -> Any:
        """Return a stream whose bytes are inverted before they are written."""
        return cast("Any", _InvertedWriter(output))

    def transform_from(self, input: Any) -> Any:
        """Return a stream of the bytes that were inverted."""
        return cast("Any", _InvertedReader(input))


def registry() -> ExtensionRegistry:
    """Return the extensions that a reader knows. Raises RuntimeError for a torch that has none."""
    if ExtensionRegistry is None:
        raise RuntimeError(f"torch {torch.__version__} has no extensions of checkpoints: use torch 2.7 or newer")
    known = ExtensionRegistry()
    known.register(Inverting)
    return known


def _inverted(data: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in data)
