"""`python -m conformance sim run`: a script on the simulated device, unchanged."""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import msgspec

from conformance.cli.command import Answer, Commands, seconds
from conformance.outcomes import Unsupported
from conformance.sim.autoload import require_installed
from conformance.sim.building import device_library
from conformance.sim.schedules import DEFAULT
from conformance.sim_runs import running
from conformance.sim_runs.races.exploring import LIMIT_S, explore
from conformance.sim_runs.races.text import text
from reference_trainer.checks import UsageError


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("run", help="run a script, or -m MODULE, on the device")
    schedules = parser.add_mutually_exclusive_group()
    schedules.add_argument(
        "--schedule", metavar="S", help=f"eager, lazy, random:SEED, starve:N or delay:FIRST-LAST (default: {DEFAULT})"
    )
    schedules.add_argument("--schedules", type=int, metavar="N", help="search races in runs under so many schedules")
    parser.add_argument("--world", type=int, metavar="N", help="ranks to start on this machine, by torchrun")
    parser.add_argument("--devices", type=int, metavar="N", help="devices of a program that starts its ranks itself")
    parser.add_argument("--translate", action="store_true", help="translate a script for CUDA, and modules beside it")
    parser.add_argument("--limit", type=seconds, default=LIMIT_S, metavar="S", help="seconds for a run of --schedules")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings of --schedules there, too")
    parser.add_argument("-m", nargs=argparse.REMAINDER, dest="module", metavar="MODULE ...", help="a module instead")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="the program and its arguments")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Run the program, once or under many schedules.

    The answer has the program's exit status, or with `--schedules` 1 if a schedule changes bits or accesses are
    unordered. Raises UsageError for a wrong program or schedule, for `--world` under torchrun, if the device cannot be
    built, and for processes of a package that is not installed.
    """
    if options.world and "RANK" in os.environ:
        raise UsageError("--world starts ranks, and this is a rank of torchrun already: leave out --world")
    schedule, devices = options.schedule or DEFAULT, options.devices or options.world
    program = options.program if options.module is None else ["-m", *options.module]
    try:
        device_library()
        if options.schedules is None and options.world is None:
            running.run_here(program, schedule=schedule, devices=devices, translate=options.translate)
            return Answer("")
        require_installed()
        command = running.command_of(program, world_size=options.world, translate=options.translate)
        if options.schedules is None:
            return Answer("", running.run_command(command, schedule=schedule, devices=devices))
        return _explored(command, options, running.environment(schedule, devices))
    except Unsupported as missing:
        raise UsageError(str(missing)) from None


def _explored(command: list[str], options: argparse.Namespace, environment: dict[str, str]) -> Answer:
    if options.schedules < 1:
        raise UsageError(f"--schedules {options.schedules}: write a positive number")
    found = explore(
        command,
        options.schedules,
        environment=environment,
        limit_s=options.limit,
        report=partial(print, file=sys.stderr),
    )
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return Answer(text(found), 0 if found.is_clean else 1)
