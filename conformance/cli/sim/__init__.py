"""`python -m conformance sim`: any program on the simulated device, one module for each of its commands."""

from conformance.cli.command import Commands
from conformance.cli.sim import build, fidelity, operators, pytorch_tests, run

_COMMANDS = (build, run, operators, pytorch_tests, fidelity)


def add_parser(commands: Commands) -> None:
    """Add the command, with its own commands."""
    parser = commands.add_parser("sim", help="any program on the simulated accelerator")
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(subcommands)
