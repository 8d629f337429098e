"""`python -m conformance versions DIR...`: the same laws on several versions of torch, in one table."""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from conformance.cli.blocks import write_block
from conformance.cli.command import Answer, Commands
from conformance.outcomes import SWEPT_OUTCOMES, swept_metric
from conformance.plan.scopes import in_order
from conformance.project import PROJECT, require_checkout
from conformance.report.schema import CaseResult, Report, read_report, verdict_counts
from reference_trainer.checks import UsageError

_DOCS_FILE = PROJECT / "docs" / "versions.md"


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("versions", help="laws by version of torch, from a report of each")
    parser.add_argument("report_dir", type=Path, nargs="+", metavar="DIR", help="reports, in the order of columns")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--write-docs", action="store_true", help="write the laws into docs/versions.md")
    output.add_argument("--write-sweeps", action="store_true", help="write the trials in sweeps into docs/versions.md")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Print the table, or write it.

    Raises UsageError if a report cannot be read, as `by_version` does, and outside of a checkout for the docs.
    """
    if options.write_docs or options.write_sweeps:
        require_checkout("--write-docs" if options.write_docs else "--write-sweeps")
    reports = by_version([read_report(directory) for directory in options.report_dir])
    if options.write_docs:
        return _write("versions", laws_text(reports))
    if options.write_sweeps:
        return _write("sweeps", sweeps_text(reports))
    return Answer("\n\n".join(filter(None, [laws_text(reports), sweeps_text(reports)])))


def by_version(reports: Sequence[Report]) -> dict[str, Report]:
    """Return reports by their version of torch, in the given order.

    Raises UsageError for two reports of one version, and for reports of different profiles or matrices.
    """
    sessions = {(report.profile, report.planned) for report in reports}
    if len(sessions) > 1:
        raise UsageError(f"reports are of different profiles: {sorted(sessions)}: give those of one")
    versions = [str(report.environment["packages"]["torch"]) for report in reports]
    if len(set(versions)) < len(versions):
        raise UsageError(f"reports are of torch {', '.join(versions)}: give one for each version")
    return dict(zip(versions, reports, strict=True))


def laws_text(reports: Mapping[str, Report]) -> str:
    """Return laws by version as Markdown: the number of cases of each verdict."""
    laws = sorted({case.law for report in reports.values() for case in report.cases}, key=in_order)
    columns = [_verdicts(report) for report in reports.values()]
    first = next(iter(reports.values()))
    header = f"Profile `{first.profile}`, {first.planned} cases for each version of torch."
    return f"{header}\n\n{_table(['law', *reports], laws, columns)}"


def sweeps_text(reports: Mapping[str, Report]) -> str:
    """Return sweeps by version as Markdown: the number of trials of each outcome; empty if no sweep ran."""
    columns = [{case.id: trials for case in report.cases if (trials := _trials(case))} for report in reports.values()]
    sweeps = sorted({case for column in columns for case in column})
    return f"Trials: {', '.join(SWEPT_OUTCOMES)}.\n\n{_table(['sweep', *reports], sweeps, columns)}" if sweeps else ""


def _table(headers: Sequence[str], names: Sequence[str], columns: Sequence[Mapping[str, str]]) -> str:
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _verdicts(report: Report) -> dict[str, str]:
    """Return the verdicts on each law: `41 pass, 2 fail`."""
    by_law: dict[str, list[CaseResult]] = defaultdict(list)
    for case in report.cases:
        by_law[case.law].append(case)
    return {
        law: ", ".join(f"{number} {verdict}" for verdict, number in verdict_counts(cases).items())
        for law, cases in by_law.items()
    }


def _trials(case: CaseResult) -> str:
    """Return the number of trials of each outcome in the case of a sweep; empty for any other case."""
    metrics = [metric for outcome in SWEPT_OUTCOMES if (metric := case.measured.get(swept_metric(outcome)))]
    return ", ".join(str(int(metric.value or 0)) for metric in metrics)


def _write(block: str, text: str) -> Answer:
    write_block(_DOCS_FILE, block, text)
    return Answer(f"written: {_DOCS_FILE}")
