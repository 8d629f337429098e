"""`python -m conformance refusals DIR`: calls of sweeps that torch refuses, compared with measured ones, or kept."""

import argparse
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import msgspec

from conformance.cli.command import Answer, Commands
from conformance.project import require_checkout
from conformance.report.schema import Report, read_report
from conformance.sweeps.refusals import REFUSALS_FILE, REFUSED, Errors, Refusals, excess, read_refusals
from conformance.torch_release import release


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("refusals", help="calls of sweeps that torch refuses, by release: the laws' bound")
    parser.add_argument("reports", metavar="DIR", type=Path, nargs="+", help="directories of reports")
    parser.add_argument("--write", action="store_true", help=f"keep them in {REFUSALS_FILE.name}")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Keep the refusals of all bounded cases in reports, or show those that are not kept yet: status 1."""
    kept = dict(read_refusals())
    lines = []
    for report in map(read_report, options.reports):
        version = ".".join(map(str, release(str(report.environment["packages"]["torch"]))))
        for case, errors in refused_calls(report).items():
            lines += [
                f"{case} on torch {version}: {subject}: {text}" for subject, _, text in excess(case, errors, version)
            ]
            kept[case] = kept.get(case, Refusals(versions=[], errors={})).put(version, errors)
    if options.write:
        require_checkout("refusals --write")
        REFUSALS_FILE.write_bytes(
            msgspec.json.format(msgspec.json.encode(dict(sorted(kept.items()))), indent=1) + b"\n"
        )
        return Answer("\n".join([*lines, f"{REFUSALS_FILE.name}: {len(kept)} cases"]))
    return Answer("\n".join(lines) or "nothing is refused but what was measured", status=int(bool(lines)))


def refused_calls(report: Report) -> Mapping[str, Mapping[str, Errors]]:
    """Return the refused calls of each case of a sweep whose refusals are bounded, by subject."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for case in report.cases:
        if not any(name.startswith(REFUSED) for name in case.measured):
            continue
        subjects = found.setdefault(case.id, defaultdict(dict))
        for name, metric in case.measured.items():
            subject, separator, error = name.removeprefix(REFUSED).partition(": refused: ")
            if name.startswith(REFUSED) and separator:
                subjects[subject][error] = int(metric.value or 0)
    return found
