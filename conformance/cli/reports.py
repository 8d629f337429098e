"""Commands about reports of sessions: `html` and `diff` of one or two, `schema` of their files."""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from conformance.cli.command import Answer, Commands
from conformance.report.diff import as_markdown, as_text, diff
from conformance.report.schema import line_schema, read_report, report_schema


def add_parser(commands: Commands) -> None:
    """Add the three commands."""
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
    parser.set_defaults(run=run_diff)
    parser = commands.add_parser("html", help="write report.html again, from report.json")
    parser.add_argument("report_dir", type=Path, metavar="DIR", help="the report's directory")
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="overlay the losses of this earlier report")
    parser.set_defaults(run=run_html)
    parser = commands.add_parser("schema", help="JSON Schema of report.json, or of a line of report.jsonl")
    parser.add_argument("--line", action="store_true", help="of a line of report.jsonl")
    parser.set_defaults(run=run_schema)


def run_diff(options: argparse.Namespace) -> Answer:
    """Compare two reports. Raises UsageError if one cannot be read, or if they cannot be compared."""
    difference = diff(read_report(options.before), read_report(options.after), any_suite=options.any_suite)
    render = as_json if options.json else as_markdown if options.markdown else as_text
    return Answer(render(difference), difference.exit_status)


def run_html(options: argparse.Namespace) -> Answer:
    """Write report.html. Raises UsageError if a report cannot be read."""
    from conformance.report.html import html_report

    file: Path = options.report_dir / "report.html"
    baseline = read_report(options.baseline) if options.baseline else None
    file.write_text(html_report(read_report(options.report_dir), baseline=baseline))
    return Answer(f"written: {file}")


def run_schema(options: argparse.Namespace) -> Answer:
    """Print a schema."""
    return Answer(as_json(line_schema() if options.line else report_schema()))


def as_json(value: Any) -> str:
    """Return a value of builtin types and structs as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()
