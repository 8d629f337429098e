"""`python -m conformance html DIR`: report.html again, from report.json."""

import argparse
from pathlib import Path

from conformance.cli.command import Answer, Commands
from conformance.report.schema import read_report


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("html", help="write report.html again, from report.json")
    parser.add_argument("report_dir", type=Path, metavar="DIR", help="the report's directory")
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="overlay the losses of this earlier report")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Write report.html. Raises UsageError if a report cannot be read."""
    from conformance.report.html import html_report

    file: Path = options.report_dir / "report.html"
    baseline = read_report(options.baseline) if options.baseline else None
    file.write_text(html_report(read_report(options.report_dir), baseline=baseline))
    return Answer(f"written: {file}")
