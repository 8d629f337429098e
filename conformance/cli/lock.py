"""`python -m conformance lock`: matrix.lock, the derived cells, best first, with their durations."""

import argparse
from collections import defaultdict
from pathlib import Path

from conformance.cli.command import Answer, Commands, add_matrix
from conformance.matrix_lock.derivation import CALIBRATION_S
from conformance.matrix_lock.lock_file import HEADER_LINES, lock_text, planned, read_lock
from conformance.plan.cells import Cell
from conformance.plan.lock import lock_file
from conformance.report.schema import read_report
from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import load


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("lock", help="derive the cells of the matrix, and order them best first")
    add_matrix(parser)
    parser.add_argument("--write", action="store_true", help="write the lock file, instead of checking it")
    parser.add_argument(
        "--afresh", action="store_true", help="derive all cells anew; by default those of the lock file stay if needed"
    )
    parser.add_argument(
        "--durations", metavar="DIR", type=Path, help="take the durations of cells from the report in this directory"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Write the lock file, or check it: status 1 if the matrix derives other cells now."""
    matrix_file = Path(options.matrix)
    file, document = lock_file(matrix_file), load(matrix_file)
    written = read_lock(file)
    durations_s = {each.cell.id: each.seconds for each in written if each.measured}
    if options.durations:
        durations_s |= _durations_s(options.durations)
    locked = defaultdict[str, list[Cell]](list)
    for each in () if options.afresh else written:
        locked[each.section].append(each.cell)
    text = lock_text(document, planned(document, durations_s, locked))
    if options.write:
        file.write_text(text)
        return Answer(f"{file.name}: {len(text.splitlines()) - HEADER_LINES} cells")
    if not file.exists() or file.read_text() != text:
        return Answer(f"{file.name} is not what {matrix_file.name} derives: run `conformance lock --write`", status=1)
    return Answer(f"{file.name} is current")


def _durations_s(directory: Path) -> dict[str, float]:
    """Return the durations of cells in a report, as on the reference machine: of their runs and of judging.

    Raises UsageError for a report without a calibration, and for one of several workers, which slow each other down.
    """
    report = read_report(directory)
    if report.calibration_s is None or report.workers != 1:
        raise UsageError(f"{directory}: durations are taken from a session with a calibration and one worker")
    seconds: dict[str, float] = defaultdict(float)
    for case in report.cases:
        seconds[case.cell] += case.duration_s - case.wait_s
    slower = report.calibration_s / CALIBRATION_S
    return {cell: round(max(cell_s / slower, 0.01), 2) for cell, cell_s in seconds.items()}
