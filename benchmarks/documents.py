"""Documents of docs/ into which benchmarks write their tables."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]


def write_between(document: Path, name: str, text: str) -> None:
    """Replace the text between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. Raises ValueError without marks."""
    marks = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    old = document.read_text()
    begin, end = (old.index(mark) for mark in marks)
    document.write_text(f"{old[: begin + len(marks[0])]}\n{text}\n{old[end:]}")
