"""Names that a program gives its objects, read from its source. Nothing here imports torch."""

import linecache
import re


def assigned_in(file: str, line: int) -> str | None:
    """Return the variable or attribute that a line of a Python file assigns to; None for a line of another kind."""
    match = re.match(r"\s*(?:\w+\.)*(\w+)\s*=[^=]", linecache.getline(file, line))
    return match.group(1) if match else None
