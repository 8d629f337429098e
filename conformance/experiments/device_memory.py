"""Memory of a step on devices while the host runs ahead of them. Not yet run on CUDA: docs/gpu.md."""

import gc

import msgspec
import torch

from conformance.experiments.context import RankWorld, experiment
from conformance.instruments import accelerators
from conformance.run.experiment import Needs
from conformance.simulated_device import device as simulated
from conformance.simulated_device.schedules import Schedule
from reference_trainer.observer import Observer, Phase

_ENDS = ("eager", "lazy")
"""Schedules of the simulated device between which those of any device lie."""
_GROUPS_OF_2_7 = {"0": simulated.Lifetime.RECORD_STREAM, "1": simulated.Lifetime.AVOID_RECORD_STREAMS}
"""Lifetimes of tensors in process groups up to torch 2.7, by the value of TORCH_NCCL_AVOID_RECORD_STREAMS."""
_WIDTH = 4096
_PRODUCTS = 50
"""Number of products: 7 TFLOP, over 0.1 s on the fastest devices, while the host issues a full pass of `deep`."""


class DevicePeaks(msgspec.Struct):
    """Peaks of the caching allocator in one step, in bytes above those before the trainer was built."""

    allocated: int
    """Bytes in use."""
    active: int
    """Bytes in use, or freed and waiting for a stream."""
    reserved: int
    """Bytes that the allocator has taken from the device."""


@experiment(needs=Needs.TRAINING)
def step_on_device(rank: RankWorld) -> dict[str, DevicePeaks]:
    """Measure the second step on a rank's device, by how far the device is behind the host.

    `behind` on CUDA, where the host runs ahead as far as it can. The simulated device is measured at both ends of what
    timings can do: `eager`, where it keeps up, and `lazy`, where it is as far behind as events permit.
    """
    if rank.device.type != simulated.NAME:
        return {"behind": _peaks(rank, _HostAhead(rank.device))}
    peaks = {}
    for name in _ENDS:
        simulated.follow(Schedule.parse(name))
        peaks[name] = _peaks_alone(rank)
    return peaks


@experiment(needs=Needs.TRAINING)
def step_with_older_process_group(rank: RankWorld) -> dict[str, DevicePeaks]:
    """Measure the second step on the simulated device with process groups as NCCL's were up to torch 2.7.

    Returns the peaks by the value of TORCH_NCCL_AVOID_RECORD_STREAMS, which those read, under the schedule `lazy`;
    nothing on another device, whose process groups are those of the installed torch.
    """
    if rank.device.type != simulated.NAME:
        return {}
    simulated.follow(Schedule.parse("lazy"))
    peaks = {}
    for value, lifetime in _GROUPS_OF_2_7.items():
        simulated.use_lifetime(lifetime)
        peaks[value] = _peaks_alone(rank)
    simulated.use_lifetime(simulated.Lifetime.HELD_UNTIL_WAIT)
    return peaks


def _peaks_alone(rank: RankWorld) -> DevicePeaks:
    """Measure on the simulated device, and empty its caches, which would count for the next run."""
    peaks = _peaks(rank, Observer())
    gc.collect()
    torch.accelerator.empty_cache()
    return peaks


def _peaks(rank: RankWorld, observer: Observer) -> DevicePeaks:
    device = rank.device
    before = allocator_bytes(device, "current")
    trainer = rank.trainer(observer)
    trainer.train_step(0)
    accelerators.synchronize()
    accelerators.reset_peaks(device)
    trainer.train_step(1)
    peaks = allocator_bytes(device, "peak")
    return DevicePeaks(**{kind: peak - before[kind] for kind, peak in peaks.items()})


class _HostAhead(Observer):
    """Observer that gives the device work before forward and before backward, as large models do.

    A device that waits for the host is never behind: then no memory waits for a stream, right or wrong.
    """

    def __init__(self, device: torch.device) -> None:
        self._factor, self._product = (torch.zeros(_WIDTH, _WIDTH, device=device) for _ in range(2))

    def phase(self, name: Phase, *, step: int) -> None:
        for _ in range(_PRODUCTS if name in ("forward", "backward") else 0):
            torch.mm(self._factor, self._factor, out=self._product)


def allocator_bytes(device: torch.device, when: str) -> dict[str, int]:
    """Return the `allocated`, `active` and `reserved` bytes of a device; `when` is `current` or `peak`."""
    statistics = accelerators.statistics(device)
    return {kind: statistics[f"{kind}_bytes.all.{when}"] for kind in ("allocated", "active", "reserved")}
