"""`python -m conformance list`: the cells of a profile with the laws judged on them, or the ids of its cases."""

import argparse
from collections import defaultdict
from collections.abc import Sequence

from tabulate import tabulate

from conformance.cli.command import Answer, Commands, add_matrix, add_profile
from conformance.plan.cells import Cell
from conformance.plan.lock import STARTUP_S
from conformance.plan.matrix import Case, Matrix, load_matrix
from conformance.plan.selection import parse, parse_laws
from reference_trainer.checks import UsageError


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("list", help="the cells of a profile with the laws judged on them")
    add_matrix(parser)
    add_profile(parser)
    parser.add_argument("--cells", metavar="EXPR", help="only these cells, such as 'tp=2 and precision=fp32'")
    parser.add_argument("--laws", metavar="IDS", help="only these laws, such as 'PAR-1,CLIP-*'")
    parser.add_argument("--cases", action="store_true", help="one case id (LAW/CELL) per line instead of the table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """List the cells, or the cases, of a profile.

    Raises UsageError for an invalid matrix, profile or selection, and for a selection without a case: with the nearest
    ids, if a cell is named that cannot be.
    """
    only = None if options.cells is None else parse(options.cells)
    matrix = load_matrix(options.matrix)
    laws = matrix.laws() if options.laws is None else parse_laws(options.laws, matrix.laws())
    cases = [case for case in matrix.cases(options.profile, only=only) if case.law in laws]
    if not cases:
        for cell_id in only.ids if only else ():
            matrix.cell(cell_id)
        raise UsageError(f"no case of profile {options.profile} is selected: `list` without --cells and --laws has all")
    if options.cases:
        return Answer("\n".join(case.id for case in cases))
    return Answer(_table(options.profile, cases, matrix))


def _table(profile: str, cases: Sequence[Case], matrix: Matrix) -> str:
    """Return a table of the cells with their laws, and one of the rules by which cells are excluded."""
    laws = defaultdict[Cell, list[str]](list)
    for case in cases:
        laws[case.cell].append(case.law)
    rows = [[cell.id, cell.world_size, len(judging), ", ".join(judging)] for cell, judging in laws.items()]
    rows.sort(key=lambda row: (row[1], row[0]))
    expected_s = STARTUP_S + sum(matrix.seconds[cell.id] for cell in laws)
    expected = f"{expected_s:.0f} s on the machine of matrix.lock, with all laws of the cells"
    sections = [
        tabulate(rows, headers=["cell", "ranks", "laws", ""]),
        f"profile {profile}: {len(cases)} cases on {len(laws)} cells, {expected}",
    ]
    if matrix.exclusions:
        rules = [[rule.when, rule.reason] for rule in matrix.exclusions]
        sections.append(tabulate(rules, headers=["excluded cells", "reason"], maxcolwidths=[60, 80]))
    return "\n\n".join(sections)
