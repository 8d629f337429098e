"""Tables that a benchmark writes into a page of the documentation."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]


def write_between(page: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. Raises ValueError without them."""
    marks = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    old = page.read_text()
    begin, end = (old.index(mark) for mark in marks)
    page.write_text(f"{old[: begin + len(marks[0])]}\n{text}\n{old[end:]}")
