"""Comparison of predicted memory with that of a device, and the settings with which a model would fit."""

import re
from itertools import product

import msgspec
from msgspec.structs import replace

from conformance.cli.prediction import (
    PhaseMemory,
    Request,
    checkpointing_kinds,
    configuration,
    phase_memory,
    reshard_modes,
)
from reference_trainer.checks import require

_UNITS_BYTES = {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}


class Setting(msgspec.Struct, frozen=True):
    """Reshard mode and activation checkpointing that were tried in place of those that were asked for."""

    reshard: str
    activation_checkpointing: str
    peak_bytes: int
    left_bytes: int
    """Memory of the device above the peak; negative if the setting does not fit."""


class DeviceFit(msgspec.Struct, frozen=True):
    """Room that a prediction leaves on a device."""

    device_bytes: int
    phase: str
    """Phase with the largest peak."""
    left_bytes: int
    """Memory of the device above that peak; negative if the model does not fit."""
    tried: list[Setting]
    """Other settings, from the fastest to the least memory; none if the model fits."""

    @property
    def fits(self) -> bool:
        """True if no phase needs more than the device has."""
        return self.left_bytes >= 0


def parse_bytes(size: str) -> int:
    """Return the bytes of a size such as `80GiB`. Raises UsageError for any other text, and for 0."""
    match = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?) ?({'|'.join(_UNITS_BYTES)})", size)
    nbytes = int(float(match[1]) * _UNITS_BYTES[match[2]]) if match else 0
    units = ", ".join(_UNITS_BYTES)
    require(nbytes > 0, f"device memory {size}: write a number above 0 and a unit, one of {units}: 80GiB")
    return nbytes


def device_fit(request: Request, phases: dict[str, PhaseMemory], *, device_bytes: int) -> DeviceFit:
    """Compare predicted `phases` with a device, and try other settings of the request if they do not fit.

    Raises UsageError as `prediction` does.
    """
    phase, memory = max(phases.items(), key=lambda item: item[1].peak_bytes)
    left_bytes = device_bytes - memory.peak_bytes
    return DeviceFit(device_bytes, phase, left_bytes, [] if left_bytes >= 0 else _others(request, device_bytes))


def _others(request: Request, device_bytes: int) -> list[Setting]:
    """All combinations but that of the request."""
    asked_for = (request.activation_checkpointing, request.reshard)
    settings = []
    for checkpointing, reshard in product(checkpointing_kinds(request), reshard_modes(request)):
        if (checkpointing, reshard) != asked_for:
            other = replace(request, reshard=reshard, activation_checkpointing=checkpointing)
            peak_bytes = max(memory.peak_bytes for memory in phase_memory(*configuration(other)).values())
            settings.append(Setting(reshard, checkpointing, peak_bytes, device_bytes - peak_bytes))
    return settings
