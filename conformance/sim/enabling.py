"""Simulated device as the accelerator of any program, with a device for each rank on this machine."""

import atexit
import os
import time
from pathlib import Path

from conformance.sim import settings
from conformance.sim.building import device_library
from conformance.sim.schedules import DEFAULT, Schedule

_LAST_REFERENCES_S = 0.05


def enable(schedule: str | None = None, devices: int | None = None) -> None:
    """Make `sim` the accelerator of this process; builds the device first if this machine has none for this torch.

    Without arguments the variables of `settings` choose. Fresh memory of the device holds NaN. Raises UsageError for an
    unknown schedule or number of devices, Unsupported if the device cannot be built, and RuntimeError if the process
    has another accelerator of this kind.
    """
    chosen = Schedule.parse(schedule or os.environ.get(settings.SCHEDULE_VARIABLE) or DEFAULT)
    count = settings.device_count() if devices is None else settings.checked_count(devices)
    library = device_library()
    # Not at the top: the import of torch calls this function if the environment asks for the device, see `autoload`.
    from conformance.sim import device, recording

    device.load(library, devices=count, with_generators=True)
    device.follow(chosen.for_rank(int(os.environ.get("RANK", "0"))))
    device.poison(True)
    atexit.register(_let_autograd_finish)
    if directory := os.environ.get(settings.RECORD_VARIABLE):
        recording.record(Path(directory))


def _let_autograd_finish() -> None:
    """Give the interpreter to autograd's thread of the device, which drops references after `backward` has returned.

    A thread that asks for the interpreter once it shuts down is ended by Python, and torch takes that for an exception:
    "terminate called without an active exception". Torch has the same threads for each device of another type than CPU.
    """
    time.sleep(_LAST_REFERENCES_S)
