"""matrix.lock: the derived cells, best first, with their durations; generated, committed and reviewed.

`python -m conformance lock` writes the file, see `conformance.matrix_lock`; sessions only read it. Durations are those
of a reference machine with two processors, on which the calibration takes the time that the file names: a duration that
was measured elsewhere is divided by the ratio of the two calibrations. So a budget has the same cells on every machine.
"""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from conformance.plan.cells import Cell, cell_from_id
from conformance.plan.content import Content
from conformance.plan.mesh import AxisError
from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import ConfigError

_CALIBRATION = re.compile(r"# calibration ([0-9]+\.[0-9]+) s")
_LINE = re.compile(r"([a-z0-9-]+) +(~?)([0-9]+\.[0-9]+) +([a-z0-9_.+-]+)(?: +not ([A-Z0-9,-]+))?")
_WRITE = "run `python -m conformance lock --write"


class PlannedCell(msgspec.Struct, frozen=True):
    """Cell of the lock file."""

    section: str
    """Section that derived the cell first."""
    seconds: float
    """Time that a session on the reference machine takes longer with this cell than without it."""
    cell: Cell
    measured: bool = False
    """True if the time is of a report; otherwise `matrix_lock.derivation` has estimated it."""
    nothing_new: tuple[str, ...] = ()
    """Laws that a profile with `own_runs: new` leaves out here, see `Profile.own_runs`."""


STARTUP_S = 8.0
"""Time that a session on the reference machine takes without the durations of its cells: a worker imports torch,
collects, and starts ranks.

It includes first-time work of ranks where a short session has other first cells than the timed one."""
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_budget(text: str) -> float:
    """Return a time such as `90s`, `5m` or `1h` in seconds; raises UsageError for any other text."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", text)
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if seconds <= 0.0:
        raise UsageError(f"budget `{text}`: write a time with its unit, such as 90s, 5m or 1h")
    return seconds


def within(planned: Sequence[PlannedCell], budget_s: float) -> list[PlannedCell]:
    """Return the longest beginning of the cells with which a session ends within a budget."""
    ends_s = itertools.accumulate((each.seconds for each in planned), initial=STARTUP_S)
    next(ends_s)
    return [each for each, end_s in zip(planned, ends_s, strict=True) if end_s <= budget_s]


def lock_file(matrix_file: Path) -> Path:
    """Return the path of the lock file of a matrix."""
    return matrix_file.with_suffix(".lock")


def locked_cells(matrix_file: Path, content: Content) -> list[PlannedCell]:
    """Return the cells of a matrix in the order of its lock file.

    Raises ConfigError for a matrix without a lock file, a lock file of another version of the matrix, and a line that
    is no cell.
    """
    file = lock_file(matrix_file)
    if not file.exists():
        raise ConfigError(f"{matrix_file} has no {file.name}: {_WRITE} --matrix {matrix_file}`")
    lines = file.read_text().splitlines()
    if f"# digest {content.cells_digest}" not in lines[:4]:
        raise ConfigError(f"{file.name} is of another version of {matrix_file.name}: {_WRITE}`")
    return [planned_cell(file, number, line) for number, line in enumerate(lines, 1) if not line.startswith("#")]


def reference_calibration_s(matrix_file: Path) -> float:
    """Return the time that the calibration takes on the machine of a lock file's durations; raises ConfigError."""
    file = lock_file(matrix_file)
    for line in file.read_text().splitlines():
        if match := _CALIBRATION.fullmatch(line):
            return float(match[1])
    raise ConfigError(f"{file.name} has no line `# calibration SECONDS s`: {_WRITE}`")


def planned_cell(file: Path, number: int, line: str) -> PlannedCell:
    """Return the cell of a line of a lock file; raises ConfigError for a line that is no cell."""
    match = _LINE.fullmatch(line)
    if match is None:
        raise ConfigError(f"{file.name}:{number}: not `SECTION SECONDS CELL [not LAWS]`: {_WRITE}`")
    try:
        return PlannedCell(
            section=match[1],
            seconds=float(match[3]),
            cell=cell_from_id(match[4]),
            measured=not match[2],
            nothing_new=tuple(match[5].split(",")) if match[5] else (),
        )
    except AxisError as error:
        raise ConfigError(f"{file.name}:{number}: {error}; {_WRITE}`") from None
