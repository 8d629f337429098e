"""`python -m conformance refusals DIR`: calls that torch refuses, or that communicate, compared with measured ones."""

import argparse
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import msgspec

from conformance.cli.command import Answer, Commands
from conformance.project import require_checkout
from conformance.report.schema import Report, read_report
from conformance.sweeps.refusals import (
    BOUNDED,
    COMMUNICATING,
    COMMUNICATIONS_FILE,
    REFUSALS_FILE,
    REFUSED,
    CallCounts,
    Counts,
    newly_communicating,
    newly_refused,
    read_communications,
    read_refusals,
)
from conformance.torch_release import release


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("refusals", help="calls that torch refuses or that communicate, by release: bounds")
    parser.add_argument("reports", metavar="DIR", type=Path, nargs="+", help="directories of reports")
    parser.add_argument(
        "--write", action="store_true", help=f"keep them in {REFUSALS_FILE.name} and {COMMUNICATIONS_FILE.name}"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Keep the counts of all bounded cases in reports, or show those that are not kept yet: status 1."""
    refusals, communications = dict(read_refusals()), dict(read_communications())
    lines = []
    for report in map(read_report, options.reports):
        version = ".".join(map(str, release(str(report.environment["packages"]["torch"]))))
        refused, communicating = counted(report, REFUSED), counted(report, COMMUNICATING)
        for case, errors in refused.items():
            passes = communicating[case]
            new = [*newly_refused(case, errors, version), *newly_communicating(case, passes, errors, version)]
            lines += [f"{case} on torch {version}: {subject}: {text}" for subject, _, text in new]
            refusals[case] = _put(refusals.get(case), version, errors)
            if passes or case in communications:
                communications[case] = _put(communications.get(case), version, passes)
    if options.write:
        require_checkout("refusals --write")
        for file, kept in ((REFUSALS_FILE, refusals), (COMMUNICATIONS_FILE, communications)):
            file.write_bytes(msgspec.json.format(msgspec.json.encode(dict(sorted(kept.items()))), indent=1) + b"\n")
        return Answer("\n".join([*lines, f"{REFUSALS_FILE.name}: {len(refusals)} cases"]))
    nothing = "nothing is refused or communicates but what was measured"
    return Answer("\n".join(lines) or nothing, status=int(bool(lines)))


def _put(kept: CallCounts | None, version: str, counts: Mapping[str, Counts]) -> CallCounts:
    return (kept or CallCounts(versions=[], counts={})).put(version, counts)


def counted(report: Report, separator: str) -> Mapping[str, Mapping[str, Counts]]:
    """Return the numbers of calls of each bounded case by subject and by the text after `separator` in a metric."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for case in report.cases:
        if not any(name.startswith(BOUNDED) for name in case.measured):
            continue
        subjects = found.setdefault(case.id, defaultdict(dict))
        for name, metric in case.measured.items():
            subject, is_counted, text = name.removeprefix(BOUNDED).partition(separator)
            if name.startswith(BOUNDED) and is_counted:
                subjects[subject][text] = int(metric.value or 0)
    return found
