"""Pytest plugin, installed as an entry point: `--sim` runs the tests of any project on the simulated device.

Options are added to a session only if its command line has one of them: another plugin may use the name.
"""

import os

import pytest

from conformance.outcomes import Unsupported
from conformance.sim.schedules import DEFAULT
from conformance.sim.settings import DEVICES_VARIABLE, SCHEDULE_VARIABLE
from reference_trainer.checks import UsageError


@pytest.hookimpl(tryfirst=True)  # conftest files import torch
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Make `sim` the accelerator of the session and of the processes that it starts. Raises pytest.UsageError."""
    if not any(argument.partition("=")[0] in ("--sim", "--sim-devices") for argument in args):
        return
    group = parser.getgroup("simulated accelerator")
    group.addoption("--sim", nargs="?", const=DEFAULT, metavar="SCHEDULE", help="run on the simulated accelerator")
    group.addoption("--sim-devices", type=int, metavar="N", help="number of devices (default: 1)")
    options = parser.parse_known_args(args)
    os.environ[SCHEDULE_VARIABLE] = options.sim or DEFAULT
    if options.sim_devices is not None:
        os.environ[DEVICES_VARIABLE] = str(options.sim_devices)
    try:
        # Not at the top: other sessions of pytest do not pay for this import.
        from conformance.sim.enabling import enable

        enable()
    except (UsageError, Unsupported) as error:
        raise pytest.UsageError(str(error)) from None
