"""`python -m conformance waive --from DIR`: drafts of waivers for the failures of a session."""

import argparse
import datetime
import json
import textwrap
from pathlib import Path

from conformance.cli.command import Answer, Commands
from conformance.judge.accepted import ACCEPTED
from conformance.judge.measurements import margin_of
from conformance.judge.verdicts import Verdict
from conformance.report.schema import CaseResult, Report, read_report
from conformance.run.devices.hardware import kernel_type
from conformance.torch_release import release

LASTS_DAYS = 90
"""Number of days after which a drafted waiver, or an accepted failure, expires."""
NO_ISSUE = "WRITE THE ADDRESS OF AN ISSUE"
"""Placeholder that is no address, so that waivers.yaml is refused until there is one."""
_NOT_TO_BE_WAIVED = (Verdict.TIMEOUT, Verdict.CRASH, Verdict.ERROR)
_WIDTH = 116


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("waive", help="draft waivers of what has failed, to be completed in waivers.yaml")
    parser.add_argument("--from", type=Path, required=True, dest="report_dir", metavar="DIR", help="a report")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Print the drafts. Raises UsageError if the report cannot be read."""
    return Answer(draft_waivers(read_report(options.report_dir), today=datetime.date.today()))


def draft_waivers(report: Report, *, today: datetime.date) -> str:
    """Return entries for waivers.yaml, one for each law and type of device that has failed; empty if nothing has.

    Cases that no waiver covers are named in comments: a waiver says which metrics are out of bounds, and by how much.
    """
    failed: dict[tuple[str, str], list[CaseResult]] = {}
    for case in report.cases:
        if case.verdict == Verdict.FAIL and _symptoms([case]):
            failed.setdefault((case.law, kernel_type(case.substrate)), []).append(case)
    torch = str(report.environment["packages"]["torch"])
    expires = today + datetime.timedelta(days=LASTS_DAYS)
    entries = [_entry(law, device, cases, torch=torch, expires=expires) for (law, device), cases in failed.items()]
    others = [
        f"  # {case.verdict}, which no waiver covers: {case.id}"
        for case in report.cases
        if case.verdict in _NOT_TO_BE_WAIVED or (case.verdict == Verdict.FAIL and not _symptoms([case]))
    ]
    return "\n".join([*entries, *others])


def accepted_entries(report: Report, *, reason: str, until: str) -> list[dict[str, str]]:
    """Return an entry of a file of accepted failures for each law of another trainer that has failed."""
    failed: dict[str, list[CaseResult]] = {}
    for case in report.cases:
        if case.verdict in ACCEPTED:
            failed.setdefault(case.law, []).append(case)
    name = {"trainer": report.trainer.name} if report.trainer else {}
    return [
        {"law": law, **name, "cells": _selection(cases), "reason": reason, "expires": until}
        for law, cases in failed.items()
    ]


def _selection(cases: list[CaseResult]) -> str:
    cells = ", ".join(case.cell for case in cases)
    return f"id = {cells}" if len(cases) == 1 else f"id in ({cells})"


def _entry(law: str, device: str, cases: list[CaseResult], *, torch: str, expires: datetime.date) -> str:
    version = ".".join(map(str, release(torch)))
    return "\n".join(
        [
            f"  - law: {law}",
            *_folded("cells", _selection(cases)),
            f"    device: {device}",
            f'    torch: "{version} - {version}"',
            f"    issue: {NO_ISSUE}",
            *_folded("reason", cases[0].reason),
            f"    expires: {expires.isoformat()}",
            *_symptoms(cases),
        ]
    )


def _symptoms(cases: list[CaseResult]) -> list[str]:
    """Lines with the metrics that are out of their bounds, and the values that were seen; none without a metric."""
    seen: dict[str, list[float]] = {}
    for case in cases:
        for name, metric in case.measured.items():
            if margin_of(metric) > 1.0 and metric.value is not None:
                seen.setdefault(name, []).append(metric.value)
    if not seen:
        return []
    lines = [
        line
        for name, values in seen.items()
        for line in (
            f"      - metric: {json.dumps(name)}",
            f"        least: {min(values)}",
            f"        most: {max(values)}",
        )
    ]
    return ["    shows:", *lines]


def _folded(name: str, text: str) -> list[str]:
    """A value of any characters, over as many lines as it needs."""
    lines = textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return [f"    {name}: >-", *(f"      {line}" for line in lines)]
