"""matrix.lock: the derived cells, best first, with their durations; generated, committed and reviewed.

`python -m conformance lock` writes it. Without a lock file the cells of a matrix are derived when it is read, which
takes seconds for small matrices.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from conformance.plan.cells import Cell, cell_from_id
from conformance.plan.content import Content
from conformance.plan.cost import estimated_s
from conformance.plan.derivation import derive
from conformance.plan.mesh import AxisError
from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import ConfigError

_HEADER = """\
# Cells of {name}, best first: section, duration in seconds (~ estimated), id. `python -m conformance lock` writes them.
# digest {digest}
"""
_LINE = re.compile(r"([a-z0-9-]+) +(~?)([0-9]+\.[0-9]+) +([a-z0-9_.+-]+)")
_WRITE = "run `python -m conformance lock --write`"


class PlannedCell(msgspec.Struct, frozen=True):
    """Cell of the lock file."""

    section: str
    """Section that derived the cell first."""
    seconds: float
    """Time that a session on two processors takes longer with this cell than without it."""
    cell: Cell
    measured: bool = False
    """True if the time is of a report; it is an estimate of `plan.cost` otherwise."""


STARTUP_S = 8.0
"""Time that a session takes without the durations of its cells: a worker imports torch, collects, and starts ranks.

What ranks do for the first time is part of it where a short session has other first cells than that which was timed."""


_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_budget(text: str) -> float:
    """Return a time such as `90s`, `5m` or `1h` in seconds; raises UsageError for any other text and for none."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", text)
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if seconds <= 0.0:
        raise UsageError(f"budget `{text}`: write a time with its unit, such as 90s, 5m or 1h")
    return seconds


def within(planned: Sequence[PlannedCell], budget_s: float) -> list[PlannedCell]:
    """Return the first cells of which a session ends within a budget."""
    ends_s = itertools.accumulate((each.seconds for each in planned), initial=STARTUP_S)
    next(ends_s)
    return [each for each, end_s in zip(planned, ends_s, strict=True) if end_s <= budget_s]


def lock_file(matrix_file: Path) -> Path:
    """Return the path of the lock file of a matrix."""
    return matrix_file.with_suffix(".lock")


def locked_cells(matrix_file: Path, content: Content) -> list[PlannedCell]:
    """Return the cells of a matrix in the order of its lock file; without one they are derived now.

    Raises ConfigError for a lock file that belongs to another version of the matrix, and for a line that is no cell.
    """
    file = lock_file(matrix_file)
    if not file.exists():
        return planned_cells(derive(content))
    lines = file.read_text().splitlines()
    if f"# digest {content.cells_digest}" not in lines[:4]:
        raise ConfigError(f"{file.name} is of another version of {matrix_file.name}: {_WRITE}")
    return [_planned(file, number, line) for number, line in enumerate(lines, 1) if not line.startswith("#")]


def _planned(file: Path, number: int, line: str) -> PlannedCell:
    match = _LINE.fullmatch(line)
    if match is None:
        raise ConfigError(f"{file.name}:{number}: not `SECTION SECONDS CELL`: {_WRITE}")
    try:
        return PlannedCell(match[1], float(match[3]), cell_from_id(match[4]), measured=not match[2])
    except AxisError as error:
        raise ConfigError(f"{file.name}:{number}: {error}; {_WRITE}") from None


def cells_by_section(file: Path) -> dict[str, list[Cell]]:
    """Return the cells of a lock file by section, also of another version of the matrix; none without a file.

    Cells that no axis describes any more are left out.
    """
    cells: dict[str, list[Cell]] = defaultdict(list)
    for number, line in enumerate(file.read_text().splitlines() if file.exists() else (), 1):
        try:
            planned = _planned(file, number, line)
        except ConfigError:
            continue
        cells[planned.section].append(planned.cell)
    return cells


def planned_cells(
    sections: Mapping[str, Sequence[Cell]], durations_s: Mapping[str, float] | None = None
) -> list[PlannedCell]:
    """Return the cells of all sections, in that order, with measured durations where there are any."""
    known = durations_s or {}
    return [
        PlannedCell(name, known.get(cell.id, estimated_s(cell)), cell, measured=cell.id in known)
        for name, cells in sections.items()
        for cell in cells
    ]


def lock_text(matrix_file: Path, content: Content, planned: Sequence[PlannedCell]) -> str:
    """Return the content of a lock file."""
    width = max(len(each.section) for each in planned)
    lines = [f"{each.section:<{width}} {_duration(each):>7}  {each.cell.id}\n" for each in planned]
    return _HEADER.format(name=matrix_file.name, digest=content.cells_digest) + "".join(lines)


def _duration(planned: PlannedCell) -> str:
    return f"{'' if planned.measured else '~'}{planned.seconds:.2f}"
