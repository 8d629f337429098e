"""`python -m conformance list`: the cells of a profile with the laws judged on them, or the ids of its cases."""

import argparse
from collections import defaultdict

from tabulate import tabulate

from conformance.cli.command import Answer, Commands, add_matrix, add_profile
from conformance.plan.cells import Cell
from conformance.plan.matrix import Matrix, load_matrix
from conformance.plan.selection import Selection, parse


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("list", help="the cells of a profile with the laws judged on them")
    add_matrix(parser)
    add_profile(parser)
    parser.add_argument("--cells", metavar="EXPR", help="only these cells, such as 'tp=2 and precision=fp32'")
    parser.add_argument("--cases", action="store_true", help="one case id (LAW/CELL) per line instead of the table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """List the cells, or the cases, of a profile. Raises ValueError for a matrix, profile or selection that is none."""
    matrix = load_matrix(options.matrix)
    only = parse(options.cells) if options.cells else None
    return Answer((list_cases if options.cases else list_cells)(matrix, options.profile, only=only))


def list_cases(matrix: Matrix, profile: str, *, only: Selection | None) -> str:
    """Return the ids of a profile's cases, one per line."""
    return "\n".join(case.id for case in matrix.cases(profile, only=only))


def list_cells(matrix: Matrix, profile: str, *, only: Selection | None) -> str:
    """Return a table of a profile's cells with their laws, and of the cells that its families exclude by rule."""
    laws = defaultdict[Cell, list[str]](list)
    for case in matrix.cases(profile, only=only):
        laws[case.cell].append(case.law)
    rows = [[cell.id, cell.world_size, len(of_cell), ", ".join(of_cell)] for cell, of_cell in laws.items()]
    rows.sort(key=lambda row: (row[1], row[0]))
    sections = [
        tabulate(rows, headers=["cell", "ranks", "laws", ""]),
        f"profile {profile}: {sum(map(len, laws.values()))} cases on {len(laws)} cells",
    ]
    excluded = _excluded(matrix, profile, only=only)
    if excluded:
        sections.append(tabulate(excluded, headers=["excluded cell", "family", "reason"]))
    return "\n\n".join(sections)


def _excluded(matrix: Matrix, profile: str, *, only: Selection | None) -> list[list[str]]:
    chosen = matrix.profile(profile)
    selections = [selection for selection in (chosen.cells and parse(chosen.cells), only) if selection]
    return [
        [cell.id, family, exclusion.reason]
        for family in (matrix.families if chosen.families == "all" else chosen.families)
        for cell, exclusion in matrix.excluded(family)
        if all(selected(cell) for selected in selections)
    ]
