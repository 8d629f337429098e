"""`python -m conformance schema`: JSON Schema of report.json and of the lines of report.jsonl."""

import argparse
from typing import Any

import msgspec

from conformance.cli.command import Answer, Commands
from conformance.project import PROJECT
from conformance.report.schema import line_schema, report_schema

REPORT_FILE = PROJECT / "docs" / "report.schema.json"
LINE_FILE = PROJECT / "docs" / "report_line.schema.json"


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("schema", help="JSON Schema of report.json, or of a line of report.jsonl")
    parser.add_argument("--line", action="store_true", help="of a line of report.jsonl")
    parser.add_argument("--write-docs", action="store_true", help="write both into docs/ instead of printing")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Print a schema, or write both files."""
    if not options.write_docs:
        return Answer(as_json(line_schema() if options.line else report_schema()))
    REPORT_FILE.write_text(as_json(report_schema()) + "\n")
    LINE_FILE.write_text(as_json(line_schema()) + "\n")
    return Answer(f"written: {REPORT_FILE} and {LINE_FILE}")


def as_json(schema: dict[str, Any]) -> str:
    """Return a schema as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(schema), indent=1).decode()
