"""Documents of docs/ into which benchmarks write their tables."""

from pathlib import Path

from conformance.cli.blocks import with_block
from conformance.project import PROJECT

__all__ = ["PROJECT", "write_block"]


def write_block(document: Path, name: str, text: str) -> None:
    """Replace a generated block of a document. Raises ValueError if the document does not have the block."""
    document.write_text(with_block(document.read_text(), name, text))
