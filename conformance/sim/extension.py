"""Compiled device of this process, which `device.load` has loaded."""

import sys
from typing import Any

from conformance.numerics.device_operators import SIMULATED
from conformance.sim.building import MODULE

NAME = SIMULATED
"""Type of the device."""


def extension() -> Any:
    """Return the extension module. Raises RuntimeError in a process without the device."""
    loaded = sys.modules.get(MODULE)
    if loaded is None:
        raise RuntimeError("this process has no simulated device: call conformance.sim.enabling.enable first")
    return loaded
