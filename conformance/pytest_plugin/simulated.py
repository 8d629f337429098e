"""Pytest plugin, installed as an entry point: `--sim` runs the tests of any project on the simulated device.

Options are added to a session only if its command line has `--sim`: another plugin may use their names.
"""

import importlib
import os
import sys

import pytest

from conformance.outcomes import Unsupported
from conformance.sim import settings
from conformance.sim.building import device_library
from conformance.sim.schedules import DEFAULT, Schedule
from reference_trainer.checks import UsageError

_AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_DOOR = "conformance.simulated_device"


@pytest.hookimpl(tryfirst=True)  # conftest files import torch
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Let each process of the session make `sim` its accelerator when it imports torch. Raises pytest.UsageError."""
    if "--sim" not in args:
        return
    group = parser.getgroup("simulated accelerator")
    group.addoption("--sim", action="store_true", help="run on the simulated accelerator")
    schedule = os.environ.get(settings.SCHEDULE_VARIABLE, DEFAULT)
    group.addoption("--sim-schedule", default=schedule, metavar="S", help="eager, lazy, random:SEED or starve:N")
    group.addoption("--schedules", type=int, metavar="N", help="look for races: run the session under N schedules")
    group.addoption("--sim-devices", type=int, metavar="N", help="number of devices (default: 1)")
    options = parser.parse_known_args(args)
    os.environ[settings.SCHEDULE_VARIABLE] = options.sim_schedule
    if options.sim_devices is not None:
        os.environ[settings.DEVICES_VARIABLE] = str(options.sim_devices)
    try:
        settings.device_count()
        Schedule.parse(os.environ[settings.SCHEDULE_VARIABLE])
        device_library()
    except (UsageError, Unsupported) as error:
        raise pytest.UsageError(str(error)) from None
    os.environ[_AUTOLOAD_VARIABLE] = "1"
    if "torch" in sys.modules:  # another plugin has imported torch, which found no request for the device
        importlib.import_module(_DOOR)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Run the session once for each schedule, if there are several, and print the report on races."""
    schedules = getattr(config.option, "schedules", None) if "--sim" in config.invocation_params.args else None
    if not schedules:
        return None
    from conformance.sim_runs.races.exploring import explore  # a session with one schedule does without them
    from conformance.sim_runs.races.text import text

    arguments = [*config.invocation_params.args]
    index = next(i for i, argument in enumerate(arguments) if argument.partition("=")[0] == "--schedules")
    del arguments[index : index + (1 if "=" in arguments[index] else 2)]
    exploration = explore(
        [sys.executable, "-m", "pytest", *arguments], schedules, report=lambda line: print(line, flush=True)
    )
    print(text(exploration))
    return int(not exploration.is_clean)
