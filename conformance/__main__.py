"""Entry of `python -m conformance`: one module of `conformance.cli` for each command, here they are only dispatched."""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from conformance.cli import (
    defects,
    diff,
    docs,
    html,
    laws,
    list_cells,
    predict,
    schema,
    show,
    spmd,
    verify,
    versions,
    waive,
)

if TYPE_CHECKING:
    from conformance.cli.command import Answer

_COMMANDS = (list_cells, show, laws, predict, defects, verify, diff, html, versions, waive, schema, docs, spmd)
_DESCRIPTION = """Commands besides running the suite with pytest:

  list, show, laws    what there is: cells and cases, laws, defects
  predict             memory and traffic of a model of any size
  defects             proof that laws can fail: every known fault, and its benign twin
  verify, diff, html, versions, waive, schema
                      reports: checked, compared, shown, and their fields
  docs                generated parts of README and docs: checked, written
  spmd                a session over several hosts, under torchrun
"""
_EXIT_USAGE = 2


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns 0, 1 for problems, or 2 with one line on stderr for what cannot be used."""
    options = _parser().parse_args(arguments)
    try:
        answer: Answer = options.run(options)
    except ValueError as error:
        print(f"conformance: {error}", file=sys.stderr)
        return _EXIT_USAGE
    try:
        if answer.text:
            print(answer.text, flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return answer.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m conformance",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
