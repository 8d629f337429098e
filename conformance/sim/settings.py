"""Variables of the environment by which a program, and each process that it starts, gets the simulated device."""

import os
from collections.abc import Mapping

from reference_trainer.checks import UsageError

SCHEDULE_VARIABLE = "CONFORMANCE_SIM"
"""Schedule of the process, such as `lazy`. A process that has the variable gets the device when it imports torch."""
DEVICES_VARIABLE = "CONFORMANCE_SIM_DEVICES"
"""Number of devices that the machine appears to have; by default one for each process that torchrun starts here."""
RECORD_VARIABLE = "CONFORMANCE_SIM_RECORD"
"""Directory in which each process leaves its trace and the bits that it computed, see `recording`; unset for none."""
MAX_DEVICES = 8


def device_count(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of devices that the environment asks for. Raises UsageError as `checked_count` does."""
    return checked_count(environment.get(DEVICES_VARIABLE) or environment.get("LOCAL_WORLD_SIZE") or 1)


def checked_count(count: int | str) -> int:
    """Return a number of devices. Raises UsageError unless it is in 1..MAX_DEVICES."""
    if not str(count).isdecimal() or not 1 <= int(count) <= MAX_DEVICES:
        raise UsageError(f"{count} simulated devices: write a number from 1 to {MAX_DEVICES}")
    return int(count)
