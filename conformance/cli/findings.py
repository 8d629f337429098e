"""`python -m conformance findings`: faults of released torch and of trainers, tried on the installed packages."""

import argparse
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import msgspec
from packaging.version import Version

from conformance.cli.command import Answer, Commands, add_limit
from conformance.cli.reports import as_json
from conformance.findings.execution import LIMIT_S, Shown, run_program
from conformance.findings.table import (
    CATALOGUE,
    DIRECTORY,
    TORCH,
    TRAINERS,
    VERSIONS_FILE,
    Finding,
    catalogue,
    findings,
    installed,
    read_versions,
    report,
    with_version,
)
from conformance.project import require_checkout
from conformance.run.pool import Pools
from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import allowed

_PROGRAM_FAILED = 3


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "findings",
        help="known faults of torch and trainers, tried on installed ones; exit status 3 if a program failed by itself",
    )
    parser.add_argument(
        "name", nargs="*", metavar="NAME", help="programs of findings/ (default: all whose package is installed)"
    )
    add_limit(parser, of="each", default=LIMIT_S)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print outcomes and what the programs print as JSON")
    output.add_argument("--verbose", action="store_true", help="print what the programs print, too")
    output.add_argument("--report", action="store_true", help="print a text to file upstream about each")
    output.add_argument("--write", action="store_true", help="keep the outcomes, and write findings/README.md")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Run the programs, and print or write their outcomes.

    The status is 0 whatever they show, and 3 if one failed by itself. Raises UsageError outside of a checkout, for a
    name that no program has, and for a program whose package is not installed.
    """
    require_checkout("findings")
    chosen = _chosen([*findings(DIRECTORY), *findings(TRAINERS)], options.name)
    with Pools(isolate=True) as pools:
        shown = {f.name: run_program(pools, f.file, ranks=f.ranks, limit_s=options.limit) for f in chosen}
    outcomes = {name: each.outcome for name, each in shown.items()}
    status = _PROGRAM_FAILED if "error" in outcomes.values() else 0
    if options.write:
        return Answer(_written(shown), status)
    if options.report:
        return Answer("\n\n".join(_report(finding, shown[finding.name]) for finding in chosen), status)
    return Answer(_json(chosen, shown) if options.json else _text(chosen, shown, verbose=options.verbose), status)


def _chosen(known: Sequence[Finding], names: Sequence[str]) -> list[Finding]:
    by_name = {finding.name: finding for finding in known}
    for name in names:
        if name not in by_name:
            raise UsageError(f"no finding `{name}`{allowed(name, by_name)}")
        if not _version(package := by_name[name].package):
            raise UsageError(f"finding `{name}` needs {package}, which is not installed: pip install {package}")
    return [finding for finding in known if finding.name in names or (not names and _version(finding.package))]


def _version(package: str) -> str:
    """Return the installed version of a package without its build's label, such as `+cpu`; empty if not installed."""
    try:
        return Version(importlib.metadata.version(package)).public
    except importlib.metadata.PackageNotFoundError:
        return ""


def _written(shown: dict[str, Shown]) -> str:
    """Keep the outcomes, and write the catalogue."""
    for directory in (DIRECTORY, TRAINERS):
        _keep(directory, findings(directory), shown)
    text = catalogue(
        findings(DIRECTORY),
        read_versions(DIRECTORY),
        trainers=findings(TRAINERS),
        trainer_versions=read_versions(TRAINERS),
    )
    CATALOGUE.write_text(text)
    return f"written: {CATALOGUE}"


def _keep(directory: Path, known: Sequence[Finding], shown: dict[str, Shown]) -> None:
    """Add outcomes to the file of a directory."""
    versions = read_versions(directory)
    ran = [finding for finding in known if finding.name in shown]
    for label in dict.fromkeys(map(_label, ran)):
        outcomes = {finding.name: shown[finding.name].outcome for finding in ran if _label(finding) == label}
        versions = with_version(versions, label, outcomes, [finding.name for finding in known])
    (directory / VERSIONS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(versions), indent=1) + b"\n")


def _label(finding: Finding) -> str:
    """Return the installed version of the package of a finding, as a key of `Versions`."""
    version = _version(finding.package)
    return version if finding.package == TORCH else f"{finding.package} {version}"


def _report(finding: Finding, shown: Shown) -> str:
    """Return a text about a finding, with the output of its program here, and outcomes of all versions."""
    ran_with = ", ".join(f"{package} {_version(package)}" for package in dict.fromkeys([finding.package, TORCH]))
    kept = read_versions(DIRECTORY if finding.package == TORCH else TRAINERS)
    versions = with_version(kept, _label(finding), {finding.name: shown.outcome}, [finding.name])
    return report(finding, versions, ran_with=ran_with, output=shown.output)


def _json(chosen: Sequence[Finding], shown: dict[str, Shown]) -> str:
    entries = [{**msgspec.to_builtins(finding), **msgspec.to_builtins(shown[finding.name])} for finding in chosen]
    return as_json({"torch": _version(TORCH), "findings": entries})


def _text(chosen: Sequence[Finding], shown: dict[str, Shown], *, verbose: bool) -> str:
    table = installed(chosen, {name: each.outcome for name, each in shown.items()})
    failed = [finding for finding in chosen if verbose or shown[finding.name].outcome == "error"]
    printed = [f"{finding.name}:\n{shown[finding.name].output}" for finding in failed]
    packages = dict.fromkeys([TORCH, *(finding.package for finding in chosen)])
    versions = ", ".join(f"{package} {_version(package)}" for package in packages)
    return "\n\n".join([versions, table, *printed]).rstrip()
