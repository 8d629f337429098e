"""`python -m conformance versions DIR...`: the same laws on several versions of torch, in one table."""

import argparse
from pathlib import Path

from tabulate import tabulate

from conformance.cli.blocks import with_block
from conformance.cli.command import Answer, Commands
from conformance.outcomes import SWEPT_OUTCOMES, SweptOutcome
from conformance.project import PROJECT, require_checkout
from conformance.report.diff import read_report
from conformance.report.versions import VersionTable, version_table

_DOCS_FILE = PROJECT / "docs" / "versions.md"


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("versions", help="laws by version of torch, from a report of each")
    parser.add_argument("report_dir", type=Path, nargs="+", metavar="DIR", help="reports, in the order of columns")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--html", type=Path, metavar="FILE", help="write the table as HTML, with cases and reasons")
    output.add_argument("--write-docs", action="store_true", help="write the laws into docs/versions.md")
    output.add_argument("--write-sweeps", action="store_true", help="write the trials in sweeps into docs/versions.md")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Print the table, or write it.

    Raises UsageError if a report cannot be read, as `version_table` does, and outside of a checkout for the docs.
    """
    from conformance.report.html import html_versions

    if options.write_docs or options.write_sweeps:
        require_checkout("--write-docs" if options.write_docs else "--write-sweeps")
    table = version_table([read_report(directory) for directory in options.report_dir])
    if options.html:
        options.html.write_text(html_versions(table))
        return Answer(f"written: {options.html}")
    if options.write_docs:
        return _write("versions", laws_text(table))
    if options.write_sweeps:
        return _write("sweeps", sweeps_text(table))
    return Answer("\n\n".join([laws_text(table), sweeps_text(table)] if table.sweeps else [laws_text(table)]))


def _write(block: str, text: str) -> Answer:
    _DOCS_FILE.write_text(with_block(_DOCS_FILE.read_text(), block, text))
    return Answer(f"written: {_DOCS_FILE}")


def laws_text(table: VersionTable) -> str:
    """Return laws by version as Markdown: the number of cases of each verdict, in the order of the reports."""
    laws = _table("law", [[row.law, *(judged.text for judged in row.by_version)] for row in table.rows], table)
    return f"Profile `{table.profile}`, {table.planned} cases for each version of torch.\n\n{laws}"


def sweeps_text(table: VersionTable) -> str:
    """Return sweeps by version as Markdown: the number of trials of each outcome, in the order of the reports."""
    sweeps = _table("sweep", [[row.case, *map(_spelled, row.by_version)] for row in table.sweeps], table)
    return f"Trials: {', '.join(SWEPT_OUTCOMES)}.\n\n{sweeps}"


def _table(what: str, rows: list[list[str]], table: VersionTable) -> str:
    headers = [what, *(column.version for column in table.columns)]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _spelled(counts: dict[SweptOutcome, int] | None) -> str:
    return ", ".join(str(counts[outcome]) for outcome in SWEPT_OUTCOMES) if counts else "-"
