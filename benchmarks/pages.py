"""Tables that a benchmark writes into a page of the documentation."""

from pathlib import Path

from conformance.cli.blocks import with_block

PROJECT = Path(__file__).resolve().parents[1]


def write_block(page: Path, name: str, text: str) -> None:
    """Replace a generated block of a page. Raises ValueError if the page does not have it."""
    page.write_text(with_block(page.read_text(), name, text))
