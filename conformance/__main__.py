"""What the suite would judge, without running it: `python -m conformance list`, `python -m conformance show ID`."""

import argparse
import os
import sys
from pathlib import Path

from conformance.describe import PROJECT, list_cases, list_cells, show
from conformance.engine.matrix import load_matrix
from conformance.engine.plugin import DEFAULT_PROFILE
from conformance.engine.selection import parse

_EXIT_USAGE = 2


def main(arguments: list[str] | None = None) -> int:
    """Print what was asked for; returns 0, or 2 with one line on stderr for what cannot be used."""
    options = _parser().parse_args(arguments)
    try:
        text = _answer(options)
    except ValueError as error:
        print(f"conformance: {error}", file=sys.stderr)
        return _EXIT_USAGE
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _answer(options: argparse.Namespace) -> str:
    matrix = load_matrix(options.matrix)
    if options.command == "show":
        return show(matrix, options.id)
    only = parse(options.cells) if options.cells else None
    return (list_cases if options.cases else list_cells)(matrix, options.profile, only=only)


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--matrix", type=Path, default=PROJECT / "matrix.yaml", metavar="FILE", help="another matrix")
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", parents=[shared], help="the cells of a profile with the laws judged on them")
    listing.add_argument("--profile", default=DEFAULT_PROFILE, metavar="P", help="default: %(default)s")
    listing.add_argument("--cells", metavar="EXPR", help="only these cells, such as 'tp=2 and precision=fp32'")
    listing.add_argument("--cases", action="store_true", help="one case id (LAW/CELL) per line instead of the table")
    showing = commands.add_parser("show", parents=[shared], help="all about one law, cell or defect")
    showing.add_argument("id", metavar="ID", help="such as PAR-1, dp2-tp2-fp32-default-meta or grads-summed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
