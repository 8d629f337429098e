"""`python -m conformance lock`: matrix.lock, the derived cells, best first, with their durations."""

import argparse
import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

from conformance.cli.command import Answer, Commands, add_matrix
from conformance.defects.catalogue import defects
from conformance.plan.cells import Cell
from conformance.plan.content import Content, read_content
from conformance.plan.derivation import derive
from conformance.plan.lock import PlannedCell, cells_by_section, lock_file, lock_text, planned_cells
from conformance.plan.ordering import best_first
from conformance.plan.scopes import Scope, declared_scopes
from conformance.plan.selection import parse
from conformance.project import LAWS_DIRECTORY
from conformance.report.schema import read_report
from reference_trainer.strict_yaml import load

_DEFECT, _OTHER_LAW, _LAW, _PAIR = 1.0, 0.05, 0.05, 0.0002
"""Weights of a defect that a cell shows, of another law to which it shows the defect, of a law that no earlier cell
has, and of a pair of values."""


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
    """Write the lock file, or check it: status 1 if it is not what the matrix derives now."""
    matrix_file = Path(options.matrix)
    file = lock_file(matrix_file)
    content = read_content(load(matrix_file))
    durations_s = known_durations_s(file) | (_of_report(options.durations) if options.durations else {})
    locked = {} if options.afresh else cells_by_section(file)
    text = lock_text(matrix_file, content, planned(content, durations_s, locked))
    if options.write:
        file.write_text(text)
        return Answer(f"{file.name}: {len(text.splitlines()) - 2} cells")
    if not file.exists() or file.read_text() != text:
        return Answer(f"{file.name} is not what {matrix_file.name} derives: run `conformance lock --write`", status=1)
    return Answer(f"{file.name} is current")


def planned(
    content: Content, durations_s: Mapping[str, float], locked: Mapping[str, Sequence[Cell]]
) -> list[PlannedCell]:
    """Return the derived cells of a matrix, best first; of locked cells, by section, those that are needed stay."""
    derived = sorted(planned_cells(derive(content, locked), durations_s), key=lambda each: each.cell.id)
    cells = {each.cell.id: each for each in derived}
    gains = _gains(content, [each.cell for each in cells.values()], declared_scopes(LAWS_DIRECTORY))
    order = best_first(list(cells), gains, {name: each.seconds for name, each in cells.items()})
    return [cells[name] for name in order]


def known_durations_s(file: Path) -> dict[str, float]:
    """Return the measured durations of cells in a lock file, by id; none without a file."""
    if not file.exists():
        return {}
    rows = (line.split() for line in file.read_text().splitlines() if not line.startswith("#"))
    return {row[2]: float(row[1]) for row in rows if len(row) == 3 and not row[1].startswith("~")}


def _of_report(directory: Path) -> dict[str, float]:
    """Return the durations of cells in a report: of their runs and of judging, in a session with one worker."""
    seconds: dict[str, float] = defaultdict(float)
    for case in read_report(directory).cases:
        seconds[case.cell] += case.duration_s - case.wait_s
    return {cell: round(max(of_cell, 0.01), 2) for cell, of_cell in seconds.items()}


def _gains(content: Content, cells: Sequence[Cell], scopes: Mapping[str, Scope]) -> dict[str, dict[Hashable, float]]:
    """Return what each cell adds: laws, defects shown on the CPU, and pairs of values under a law on numbers."""
    shown = [defect for defect in defects() if "gloo" in defect.substrates]
    triggers = [(defect.id, parse(defect.cells), set(defect.laws)) for defect in shown]
    gains: dict[str, dict[Hashable, float]] = {}
    for cell in cells:
        facts = cell.facts()
        laws = {law for law, scope in scopes.items() if scope.judges(facts)}
        gain: dict[Hashable, float] = dict.fromkeys(laws, _LAW)
        for defect, trigger, of_defect in triggers:
            if laws & of_defect and trigger.holds(facts):
                gain[defect] = _DEFECT
                gain |= dict.fromkeys(((defect, law) for law in laws & of_defect), _OTHER_LAW / len(of_defect))
        if any(scopes[law].numbers for law in laws):
            values = [(axis, facts[axis]) for axis in content.axes]
            gain |= dict.fromkeys(itertools.combinations(values, 2), _PAIR)
        gains[cell.id] = gain
    return gains
