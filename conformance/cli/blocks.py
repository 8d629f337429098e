"""Generated blocks of markdown files, each between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""

from pathlib import Path

from reference_trainer.checks import UsageError


def block(text: str, name: str) -> str:
    """Return the content of a block. Raises UsageError if the text does not have both of its marks."""
    return _split(text, name)[1].strip("\n")


def with_block(text: str, name: str, content: str) -> str:
    """Return the text with another content of a block. Raises UsageError if it does not have both marks."""
    before, _, after = _split(text, name)
    return f"{before}\n{content}\n{after}"


def write_block(document: Path, name: str, content: str) -> None:
    """Replace a block of a file. Raises UsageError if it does not have both marks."""
    document.write_text(with_block(document.read_text(), name, content))


def _split(text: str, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, has_begin, rest = text.partition(begin)
    content, has_end, after = rest.partition(end)
    if not has_begin or not has_end:
        raise UsageError(f"no block {name}: put {begin} and {end} where it belongs")
    return before + begin, content, end + after
