"""`python -m conformance versions DIR...`: the same laws on several versions of torch, in one table."""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from conformance.cli.command import Answer, Commands
from conformance.judge.law import in_order
from conformance.judge.verdicts import Verdict
from conformance.report.diff import read_report
from conformance.report.schema import Report

_ORDER = [verdict.value for verdict in Verdict]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("versions", help="laws by version of torch, from a report of each")
    parser.add_argument("report_dir", type=Path, nargs="+", metavar="DIR", help="reports, in the order of columns")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Print the table. Raises ValueError if a report cannot be read, or if two are of one version."""
    return Answer(versions_table([read_report(directory) for directory in options.report_dir]))


def versions_table(reports: Sequence[Report], *, table_format: str = "github") -> str:
    """Return laws by version: the number of cases of each verdict, `41 pass, 2 fail`, in the order of the reports.

    Raises ValueError for two reports of one version.
    """
    versions = [str(report.environment["packages"]["torch"]) for report in reports]
    if len(set(versions)) < len(versions):
        raise ValueError(f"reports are of torch {', '.join(versions)}: give one for each version")
    laws = dict.fromkeys(case.law for report in reports for case in report.cases)
    rows = [[law, *(_verdicts(report, law) for report in reports)] for law in sorted(laws, key=in_order)]
    return tabulate(rows, headers=["law", *versions], tablefmt=table_format, disable_numparse=True)


def _verdicts(report: Report, law: str) -> str:
    counts = Counter(case.verdict for case in report.cases if case.law == law)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in _ORDER if counts[verdict]) or "-"
