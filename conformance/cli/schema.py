"""`python -m conformance schema`: JSON Schema of report.json and of the lines of report.jsonl."""

import argparse
from typing import Any

import msgspec

from conformance.cli.command import Answer, Commands
from conformance.report.schema import line_schema, report_schema


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("schema", help="JSON Schema of report.json, or of a line of report.jsonl")
    parser.add_argument("--line", action="store_true", help="of a line of report.jsonl")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Print a schema."""
    return Answer(as_json(line_schema() if options.line else report_schema()))


def as_json(schema: dict[str, Any]) -> str:
    """Return a schema as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(schema), indent=1).decode()
