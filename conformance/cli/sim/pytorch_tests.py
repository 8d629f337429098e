"""`python -m conformance sim pytorch-tests`: PyTorch's own tests, from the user's checkout, on the device."""

import argparse
import importlib.metadata
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from conformance.cli.command import Answer, Commands, add_limit
from conformance.outcomes import Unsupported
from conformance.project import PROJECT, require_checkout
from conformance.sim.autoload import require_installed
from conformance.sim.building import device_library
from conformance.sim.schedules import DEFAULT, Schedule
from conformance.sim_runs.pytorch_tests.checkout import Checkout
from conformance.sim_runs.pytorch_tests.expectations import read_expectations
from conformance.sim_runs.pytorch_tests.markdown import as_markdown
from conformance.sim_runs.pytorch_tests.races import FileRaces, search_file
from conformance.sim_runs.pytorch_tests.record import Record, as_json, merged, read_records
from conformance.sim_runs.pytorch_tests.running import CPU, SIM, FileRun, Setting, run_file
from conformance.sim_runs.pytorch_tests.summary import as_text, is_open, judged
from reference_trainer.checks import UsageError

_WORLDS = (2, 4)
_LIMIT_S = 1800.0
_RECORD = PROJECT / "docs" / "sim" / "pytorch_tests.json"


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("pytorch-tests", help="PyTorch's own tests from a checkout; status 1 if one surprises")
    parser.add_argument("checkout", type=Path, metavar="DIR", help="checkout of PyTorch, or its folder `test`")
    parser.add_argument(
        "--world", type=int, choices=_WORLDS, action="append", help="number of devices; repeatable (default: 2 and 4)"
    )
    schedules = parser.add_mutually_exclusive_group()
    schedules.add_argument(
        "--schedule", action="append", metavar="S", help=f"schedule of the device; repeatable (default: {DEFAULT})"
    )
    schedules.add_argument("--schedules", type=int, metavar="N", help="search races in runs under so many schedules")
    parser.add_argument("--device", choices=(SIM, CPU), default=SIM, help="`cpu` for a comparison without the device")
    parser.add_argument("--files", nargs="+", default=(), metavar="PATTERN", help="test files whose path matches")
    add_limit(parser, of="each test file", default=_LIMIT_S)
    parser.add_argument("--report", type=Path, metavar="FILE", help="write all outcomes as JSON")
    parser.add_argument("--write", action="store_true", help="bring docs/sim/pytorch_tests.md up to date")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Run the tests and compare them with the expected outcomes, or search them for races.

    Exit status 1 if an outcome is not the expected one, if there is a race, or if a search is not finished. Raises
    UsageError for a directory that is no checkout, for patterns that match no file, for a
    schedule or a number of schedules that is none, and for a package that is not installed.
    """
    if options.write:
        require_checkout("--write")
    checkout = Checkout.at(options.checkout)
    expectations = read_expectations()
    if options.device == SIM:
        require_installed()
    try:
        record = _record(checkout, options, importlib.metadata.version("torch"))
    except Unsupported as missing:
        return Answer(str(missing), 1)
    if options.report:
        options.report.write_bytes(as_json([record]))
    if options.write:
        _write(record)
    is_unexpected = any(one.unexpected for one in judged(record, expectations))
    has_open_search = any(is_open(search, record, expectations) for search in record.races)
    return Answer(as_text(record, expectations), int(is_unexpected or has_open_search))


def _record(checkout: Checkout, options: argparse.Namespace, torch: str) -> Record:
    if options.schedules is None:
        return Record(torch, checkout.version, runs=tuple(_runs(checkout, options)))
    if options.schedules < 1 or options.device != SIM:
        raise UsageError(f"--schedules {options.schedules} on {options.device}: write a positive number, for `sim`")
    device_library()
    return Record(torch, checkout.version, races=tuple(_races(checkout, options)))


def _races(checkout: Checkout, options: argparse.Namespace) -> Iterator[FileRaces]:
    files = checkout.files(options.files)
    report = partial(print, file=sys.stderr, flush=True)
    for world in options.world or _WORLDS:
        for number, file in enumerate(files, 1):
            report(f"[{number}/{len(files)}] {file.name}, {world} ranks")
            yield search_file(checkout, file, world, options.schedules, limit_s=options.limit, report=report)


def _runs(checkout: Checkout, options: argparse.Namespace) -> Iterator[FileRun]:
    files = checkout.files(options.files)
    settings = list(_settings(options))
    for setting in settings:
        for number, file in enumerate(files, 1):
            name = ":".join(filter(None, (setting.device, setting.schedule)))
            print(f"[{number}/{len(files)}] {file.name} on {name}, {setting.world} ranks", file=sys.stderr, flush=True)
            yield run_file(checkout, file, setting, limit_s=options.limit)


def _settings(options: argparse.Namespace) -> Iterator[Setting]:
    schedules = [""]
    if options.device == SIM:
        device_library()  # built ahead of the first time limit
        schedules = options.schedule or [DEFAULT]
        for schedule in schedules:
            Schedule.parse(schedule)
    for world in options.world or _WORLDS:
        yield from (Setting(options.device, world, schedule) for schedule in schedules)


def _write(record: Record) -> None:
    records = merged(read_records(_RECORD), record)
    _RECORD.parent.mkdir(exist_ok=True)
    _RECORD.write_bytes(as_json(records))
    _RECORD.with_suffix(".md").write_text(as_markdown(records, read_expectations()))
