"""`python -m conformance sim run`: a script on the simulated device, unchanged."""

import argparse
import os

from conformance.cli.command import Answer, Commands
from conformance.outcomes import Unsupported
from conformance.sim.schedules import DEFAULT
from conformance.sim_runs import running
from reference_trainer.checks import UsageError


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("run", help="run a script, or -m MODULE, on the device")
    parser.add_argument(
        "--schedule", default=DEFAULT, metavar="S", help="eager, lazy, random:SEED or starve:N (default: %(default)s)"
    )
    parser.add_argument("--world", type=int, metavar="N", help="ranks to start on this machine, by torchrun")
    parser.add_argument("--devices", type=int, metavar="N", help="devices of a program that starts its own ranks")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="the program and its arguments")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Run the program; the answer has its exit status.

    Raises UsageError for a wrong program or schedule, for `--world` under torchrun, and if the device cannot be built.
    """
    if options.world and "RANK" in os.environ:
        raise UsageError("--world starts ranks, and this is a rank of torchrun already: leave out --world")
    try:
        if options.world:
            return Answer("", running.run_ranks(options.program, schedule=options.schedule, world_size=options.world))
        running.run_here(options.program, schedule=options.schedule, devices=options.devices)
    except Unsupported as missing:
        raise UsageError(str(missing)) from None
    return Answer("")
