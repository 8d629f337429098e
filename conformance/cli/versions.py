"""`python -m conformance versions DIR...`: the same laws on several versions of torch, one table."""

from collections import Counter
from collections.abc import Sequence

from tabulate import tabulate

from conformance.judge.law import in_order
from conformance.judge.verdicts import Verdict
from conformance.report.schema import Report

_ORDER = [verdict.value for verdict in Verdict]


def versions_table(reports: Sequence[Report], *, table_format: str = "github") -> str:
    """Laws by version: how many cases of each verdict, `41 pass, 2 fail`. Versions stand in the order of the reports.

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
