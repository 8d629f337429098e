"""Classic mistakes in a trainer with its own loop, each with the line that is wrong and a correct twin.

    python -m conformance judge benchmarks/located/mistakes/NAME.py:Wrong

The line, or each of two or three adjacent lines, ends in the comment `# mistake: ID`. `Right` in the same file differs
there and is conformant; all else is in `trainer.py`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
MAX_LINES = 3
"""Largest number of lines that one mistake marks."""
_MARK = re.compile(r"  # mistake: ([a-z][a-z-]*)$")


class Shown(NamedTuple):
    """Cell on which a mistake is shown, by id, and the laws of any trainer that fail there."""

    cell: str
    laws: frozenset[str]


def _shown(cell: str, *laws: str) -> Shown:
    return Shown(cell, frozenset(laws))


_DP, _TP, _META = "dp2-fp32-default-full", "dp2-tp2-fp32-default-full", "dp2-fp32-default-meta"
_COMPARED = ("gradient-norm", "gradients", "loss", "parameters")
"""Laws that compare a run with that of one process."""
_UNEQUAL = ("clipping", "every-update", "replicas")
"""Laws that also fail when the copies of a parameter differ: `clipping` and `every-update` cannot put it together."""
SHOWN: Mapping[str, Shown] = {
    "dropout-mask": _shown(_TP, *_COMPARED),
    "grad-placements": _shown(_TP, *_COMPARED),
    "layer-not-wrapped": _shown(_DP, "fsdp-is-on", *_UNEQUAL, *_COMPARED),
    "local-norm": _shown(_DP, "clipping", "clipping-reduces-norms", *_COMPARED),
    "loss-scaled": _shown(_TP, "gradient-norm", "gradients"),
    "norm-gradient": _shown(_TP, *_UNEQUAL, *_COMPARED),
    "rope-uninitialised": _shown(_META, "clipping", "initialised", *_COMPARED),
    "stale-weights": _shown(_DP, "parameters-are-gathered", *_COMPARED),
}
"""Cell and failing laws by the mistake's id. After clipping, a loss that is scaled changes no parameter."""


class Mistake(NamedTuple):
    """Mistake in a trainer."""

    id: str
    file: Path
    lines: range
    """Numbers of the wrong lines, from 1 on."""

    @property
    def wrong(self) -> str:
        """Name of the trainer with the mistake, for `conformance judge`."""
        return f"{self.file}:Wrong"

    @property
    def right(self) -> str:
        """Name of the trainer without it."""
        return f"{self.file}:Right"


def mistakes(folder: Path = FOLDER) -> dict[str, Mistake]:
    """Return the mistakes by id: one for each Python file in a folder that marks lines.

    Raises ValueError for a file that marks several ids, lines that are not adjacent, or more lines than `MAX_LINES`.
    """
    found = [_marked(file) for file in sorted(folder.glob("*.py"))]
    return {mistake.id: mistake for mistake in found if mistake is not None}


def _marked(file: Path) -> Mistake | None:
    marks = [
        (number, match[1])
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if (match := _MARK.search(line))
    ]
    if not marks:
        return None
    numbers, ids = [number for number, _ in marks], {mark for _, mark in marks}
    lines = range(numbers[0], numbers[-1] + 1)
    if len(ids) > 1 or len(lines) != len(numbers) or len(lines) > MAX_LINES:
        raise ValueError(f"{file} marks {sorted(ids)} on lines {numbers}: mark one id, on at most {MAX_LINES} in a row")
    return Mistake(ids.pop(), file, lines)
