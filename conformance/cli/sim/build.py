"""`python -m conformance sim build`: the simulated device, compiled ahead of its first use."""

import argparse

from conformance.cli.command import Answer, Commands
from conformance.outcomes import Unsupported
from conformance.sim.building import device_library


def add_parser(commands: Commands) -> None:
    """Add the command."""
    commands.add_parser("build", help="compile the device for the installed torch").set_defaults(run=run)


def run(_: argparse.Namespace) -> Answer:
    """Compile unless that is done; the answer is the path of the library, status 1 with the reason if it fails."""
    try:
        return Answer(str(device_library()))
    except Unsupported as missing:
        return Answer(str(missing), 1)
