"""Entry of `conformance` and `python -m conformance`, which dispatch to the commands of `conformance.cli`."""

import argparse
import os
import sys
from itertools import pairwise

import shtab

from conformance.cli import (
    coverage,
    defects,
    docs,
    explain,
    findings,
    judge,
    laws,
    list_cells,
    lock,
    predict,
    refusals,
    reports,
    show,
    sim,
    site,
    spmd,
    verify,
    versions,
    waive,
)
from conformance.cli.command import Answer, Parser
from conformance.judge.verdicts import USAGE
from conformance.run.devices.hardware import ONE_THREAD
from reference_trainer.checks import UsageError, require_given

_COMMANDS = (
    list_cells,
    show,
    laws,
    coverage,
    predict,
    judge,
    explain,
    defects,
    findings,
    refusals,
    verify,
    reports,
    versions,
    site,
    waive,
    docs,
    lock,
    sim,
    spmd,
)
_DESCRIPTION = """Commands besides running the suite with pytest:

  list, show, laws    what there is: cells and cases, laws, defects
  coverage            pairs and triples of features that laws see, and what laws leave out
  predict             memory and traffic of a model of any size
  judge               verdicts on your own trainer: on a function that makes a model parallel
  explain             the first wrong tensor or collective of a failed case
  defects             proof that laws can fail: every known fault, and its benign twin
  findings            known faults of torch and trainers, tried on what is installed
  refusals            calls of sweeps that torch refuses, by release
  verify, diff, html, versions, site, waive, schema
                      reports: checked, compared, shown, published, and their fields
  docs                generated parts of README and docs: checked, written
  sim                 any program on the simulated accelerator, under many schedules
  lock                matrix.lock, the derived cells: checked, written
  spmd                a session over several hosts, under torchrun
"""
_EXIT_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns 0, 1 for problems, or 4 for a usage error, with one line on stderr."""
    os.environ.update(ONE_THREAD)  # of commands that judge; no torch is imported yet
    try:
        words = sys.argv[1:] if arguments is None else arguments
        require_given({name: value for name, value in pairwise(words) if name.startswith("--")})
        options = _parser().parse_args(words)
        answer: Answer = options.run(options)
    except UsageError as error:
        return _complain(str(error), USAGE)
    except OSError as error:
        if error.filename is None:
            raise  # of no file that the user has named
        return _complain(f"{error.filename}: {error.strerror}", USAGE)
    except KeyboardInterrupt:
        return _complain("interrupted", _EXIT_INTERRUPTED)
    try:
        if answer.text:
            print(answer.text, flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return answer.status


def _complain(problem: str, status: int) -> int:
    print(f"conformance: {problem}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="conformance",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shtab.add_argument_to(parser, help="print a completion script for this shell")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
