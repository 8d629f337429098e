"""`python -m conformance diff A B`: differences between two reports."""

import argparse
from pathlib import Path

import msgspec

from conformance.cli.command import Answer, Commands
from conformance.report.diff import as_markdown, as_text, diff
from conformance.report.schema import read_report


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "diff", help="what is different between two reports; exit status 1 if there is more than improvements"
    )
    parser.add_argument("before", type=Path, metavar="A", help="directory of the report that is the baseline")
    parser.add_argument("after", type=Path, metavar="B", help="directory of the report that is compared with it")
    parser.add_argument(
        "--any-suite", action="store_true", help="compare even if the suite itself has changed between the reports"
    )
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="all changes as JSON, one by one")
    formats.add_argument("--markdown", action="store_true", help="as markdown, such as for a step summary")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Compare two reports. Raises UsageError if one cannot be read, or if they cannot be compared."""
    difference = diff(read_report(options.before), read_report(options.after), any_suite=options.any_suite)
    if options.json:
        text = msgspec.json.format(msgspec.json.encode(difference), indent=1).decode()
    else:
        text = as_markdown(difference) if options.markdown else as_text(difference)
    return Answer(text, difference.exit_status)
