"""`python -m conformance findings`: faults of released torch, tried on the installed one."""

import argparse
import importlib.metadata
from collections.abc import Sequence

import msgspec
from packaging.version import Version

from conformance.cli.command import Answer, Commands
from conformance.cli.schema import as_json
from conformance.findings.execution import LIMIT_S, PRESENT, Shown, run_program
from conformance.findings.programs import Finding, findings
from conformance.findings.table import (
    CATALOGUE,
    REPORTS,
    VERSIONS_FILE,
    Versions,
    catalogue,
    installed,
    read_versions,
    report,
    with_version,
)
from conformance.project import require_checkout
from conformance.run.pool import Pools
from reference_trainer.strict_yaml import allowed

_PROGRAM_FAILED = 3


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "findings",
        help="known faults of torch, tried on the installed one; exit status 3 if a program failed by itself",
    )
    parser.add_argument("name", nargs="*", metavar="NAME", help="programs of findings/ (default: all)")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="S", help="seconds for each (default: %(default)g)"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print outcomes and what the programs print as JSON")
    output.add_argument("--verbose", action="store_true", help="print what the programs print, too")
    output.add_argument("--write", action="store_true", help="keep the outcomes; write findings/README.md, reports")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Run the programs, and print or write what they show.

    The status is 0 whatever they show, and 3 if one failed by itself. Raises ValueError outside of a checkout, for a
    name that no program has, and for a limit that is not positive.
    """
    require_checkout("findings")
    known = findings()
    chosen = _chosen(known, options.name)
    with Pools(isolate=True) as pools:
        shown = {f.name: run_program(pools, f.file, ranks=f.ranks, limit_s=options.limit) for f in chosen}
    outcomes = {name: each.outcome for name, each in shown.items()}
    status = _PROGRAM_FAILED if "error" in outcomes.values() else 0
    if options.write:
        return Answer(_written(known, shown), status)
    return Answer(_json(chosen, shown) if options.json else _text(chosen, shown, verbose=options.verbose), status)


def _chosen(known: Sequence[Finding], names: Sequence[str]) -> list[Finding]:
    by_name = {finding.name: finding for finding in known}
    for name in names:
        if name not in by_name:
            raise ValueError(f"no finding `{name}`{allowed(name, by_name)}")
    return [finding for finding in known if not names or finding.name in names]


def _torch_version() -> str:
    """Return the version of the installed torch without what its build adds, such as `+cpu`."""
    return Version(importlib.metadata.version("torch")).public


def _written(known: Sequence[Finding], shown: dict[str, Shown]) -> str:
    """Keep the outcomes; write the catalogue, and reports of faults without a thread that no later torch shows."""
    torch, outcomes = _torch_version(), {name: each.outcome for name, each in shown.items()}
    versions = with_version(read_versions(), torch, outcomes, [finding.name for finding in known])
    REPORTS.mkdir(exist_ok=True)
    for finding in known:
        if finding.name in shown and not finding.has_thread and torch == _last_to_show(finding, versions):
            text = report(finding, versions, torch=torch, output=shown[finding.name].output)
            (REPORTS / f"{finding.name}.md").write_text(text)
    VERSIONS_FILE.write_bytes(msgspec.json.format(msgspec.json.encode(versions), indent=1) + b"\n")
    CATALOGUE.write_text(catalogue(known, versions))
    return f"written: {VERSIONS_FILE}, {CATALOGUE}"


def _last_to_show(finding: Finding, versions: Versions) -> str | None:
    """Return the last version of torch that shows a fault, or None: a report has what that one prints."""
    return max(
        (v for v, outcomes in versions.items() if outcomes.get(finding.name) in PRESENT), key=Version, default=None
    )


def _json(chosen: Sequence[Finding], shown: dict[str, Shown]) -> str:
    entries = [{**msgspec.to_builtins(finding), **msgspec.to_builtins(shown[finding.name])} for finding in chosen]
    return as_json({"torch": _torch_version(), "findings": entries})


def _text(chosen: Sequence[Finding], shown: dict[str, Shown], *, verbose: bool) -> str:
    table = installed(chosen, {name: each.outcome for name, each in shown.items()})
    failed = [finding for finding in chosen if verbose or shown[finding.name].outcome == "error"]
    printed = [f"{finding.name}:\n{shown[finding.name].output}" for finding in failed]
    return "\n\n".join([f"torch {_torch_version()}", table, *printed]).rstrip()
