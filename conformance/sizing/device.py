"""Room that a prediction leaves on a device, and the settings that would fit."""

from collections.abc import Sequence
from itertools import product

import msgspec
from msgspec.structs import replace

from conformance.sizing.fixed_costs import FixedCost
from conformance.sizing.prediction import (
    PhaseMemory,
    Prediction,
    Request,
    checkpointing_kinds,
    configuration,
    peak_bytes,
    phase_memory,
    reshard_modes,
)


class Setting(msgspec.Struct, frozen=True):
    """Alternative reshard mode and activation checkpointing, with the memory that they need."""

    reshard: str
    activation_checkpointing: str
    peak_bytes: int
    left_bytes: int
    """Memory of the device above the peak and its fixed costs; negative if the setting does not fit."""


class DeviceFit(msgspec.Struct, frozen=True):
    """Room that a prediction leaves on a device."""

    device_bytes: int
    phase: str
    """Phase that needs most."""
    fixed_bytes: int
    """Fixed costs of that phase, the upper end of their range."""
    left_bytes: int
    """Memory of the device above peak and fixed costs; negative if the model does not fit."""
    tried: list[Setting]
    """Other settings, from the fastest to the least memory; none if the model fits."""

    @property
    def fits(self) -> bool:
        """True if no phase needs more than the device has."""
        return self.left_bytes >= 0


def device_fit(request: Request, predicted: Prediction, *, device_bytes: int) -> DeviceFit:
    """Compare a prediction with a device, and try other settings of the request if it does not fit.

    Raises UsageError as `prediction` does.
    """
    costs = predicted.fixed_costs
    phase, needed_bytes = max(_needs(predicted.phases, costs).items(), key=lambda item: item[1])
    left_bytes = device_bytes - needed_bytes
    fixed_bytes = needed_bytes - predicted.phases[phase].peak_bytes
    others = [] if left_bytes >= 0 else _others(request, costs, device_bytes)
    return DeviceFit(device_bytes, phase, fixed_bytes, left_bytes, others)


def _needs(phases: dict[str, PhaseMemory], costs: Sequence[FixedCost]) -> dict[str, int]:
    """Return the bytes that each phase needs of a device."""
    return {name: memory.peak_bytes + sum(cost.most_in(name) for cost in costs) for name, memory in phases.items()}


def _others(request: Request, costs: Sequence[FixedCost], device_bytes: int) -> list[Setting]:
    """Return all combinations of reshard mode and checkpointing except the request's own."""
    asked_for = (request.activation_checkpointing, request.reshard)
    settings = []
    for checkpointing, reshard in product(checkpointing_kinds(request), reshard_modes(request)):
        if (checkpointing, reshard) != asked_for:
            other = replace(request, reshard=reshard, activation_checkpointing=checkpointing)
            phases = phase_memory(configuration(other))
            left_bytes = device_bytes - max(_needs(phases, costs).values())
            settings.append(Setting(reshard, checkpointing, peak_bytes(phases), left_bytes))
    return settings
