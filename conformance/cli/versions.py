"""`python -m conformance versions DIR...`: the same laws on several versions of torch, in one table."""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from conformance.cli.blocks import with_block
from conformance.cli.command import Answer, Commands
from conformance.judge.law import in_order
from conformance.judge.verdicts import Verdict
from conformance.project import PROJECT
from conformance.report.diff import read_report
from conformance.report.schema import Report

_DOCS_FILE = PROJECT / "docs" / "versions.md"
_ORDER = [verdict.value for verdict in Verdict]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("versions", help="laws by version of torch, from a report of each")
    parser.add_argument("report_dir", type=Path, nargs="+", metavar="DIR", help="reports, in the order of columns")
    parser.add_argument("--write-docs", action="store_true", help="write the table into docs/versions.md")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Print the table, or write it. Raises ValueError if a report cannot be read, and as `versions_table` does."""
    table = versions_table([read_report(directory) for directory in options.report_dir])
    if not options.write_docs:
        return Answer(table)
    _DOCS_FILE.write_text(with_block(_DOCS_FILE.read_text(), "versions", table))
    return Answer(f"written: {_DOCS_FILE}")


def versions_table(reports: Sequence[Report]) -> str:
    """Return laws by version: the number of cases of each verdict, `41 pass, 2 fail`, in the order of the reports.

    Raises ValueError for two reports of one version, and for reports of different profiles or matrices.
    """
    sessions = {(report.profile, report.planned) for report in reports}
    if len(sessions) > 1:
        raise ValueError(f"reports are of different profiles: {sorted(sessions)}: give those of one")
    versions = [str(report.environment["packages"]["torch"]) for report in reports]
    if len(set(versions)) < len(versions):
        raise ValueError(f"reports are of torch {', '.join(versions)}: give one for each version")
    laws = dict.fromkeys(case.law for report in reports for case in report.cases)
    rows = [[law, *(_verdicts(report, law) for report in reports)] for law in sorted(laws, key=in_order)]
    ((profile, cases),) = sessions
    table = tabulate(rows, headers=["law", *versions], tablefmt="github", disable_numparse=True)
    return f"Profile `{profile}`, {cases} cases for each version of torch.\n\n{table}"


def _verdicts(report: Report, law: str) -> str:
    counts = Counter(case.verdict for case in report.cases if case.law == law)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in _ORDER if counts[verdict]) or "-"
