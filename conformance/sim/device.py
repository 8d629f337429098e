"""Simulated device as the accelerator of a process, under the name `sim`.

A process gets the device permanently: torch allows one device of this kind (PrivateUse1). It may be forked until its
first tensor on the device.
"""

from datetime import timedelta
from enum import IntEnum
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from conformance.importing import load_module
from conformance.numerics.device_operators import fused_norms
from conformance.sim import generators, torch_sim
from conformance.sim.building import MODULE
from conformance.sim.extension import NAME as NAME
from conformance.sim.extension import extension
from conformance.sim.schedules import Schedule
from conformance.sim.trace import Access

BACKEND = "simccl"
"""Backend of process groups, for tensors on the device and on the host."""
BACKENDS = f"cpu:{BACKEND},{NAME}:{BACKEND}"
"""Backends for `init_process_group`. While the host's waits for peers, the device continues."""


_MILLISECOND = timedelta(milliseconds=1)


class Lifetime(IntEnum):
    """Protection of a collective's memory against early reuse by a process group; see `collectives.h`."""

    HELD_UNTIL_WAIT = 0
    """ProcessGroupNCCL since torch 2.8: references to the tensors until the collective is waited for."""
    AVOID_RECORD_STREAMS = 1
    """ProcessGroupNCCL up to 2.7 with TORCH_NCCL_AVOID_RECORD_STREAMS=1: the same, one stream for all collectives."""
    RECORD_STREAM = 2
    """ProcessGroupNCCL up to 2.7 without the variable: `record_stream`, except for synchronous collectives of FSDP."""


_kept: list[Any] = []
"""Registrations that last as long as the process."""


@cache
def load(library: Path, *, devices: int = 1, with_generators: bool = False) -> ModuleType:
    """Make the device the accelerator of this process; returns the extension module.

    With generators a device samples from its own state, as other accelerators do; without, from the CPU's generator:
    runs on both can then be compared in every bit. Raises RuntimeError if the process has another accelerator of this
    kind.
    """
    loaded = load_module(MODULE, library)
    loaded.use_devices(devices)
    rename_privateuse1_backend(NAME)
    # A device module has no public way in.
    torch._register_device_module(NAME, torch_sim)  # type: ignore[no-untyped-call]
    generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    dist.Backend.register_backend(BACKEND, make_backend, devices=[NAME])
    if with_generators:
        loaded.use_generators_of_device(True)
        generators.install()
    else:
        torch.random.fork_rng = partial(_fork_rng, torch.random.fork_rng)
    if norms := fused_norms():
        _kept.append(norms)
        loaded.fuse_norms()
    return loaded


def device() -> torch.device:
    """Return the first device."""
    return torch.device(NAME, 0)


def follow(schedule: Schedule) -> None:
    """Run all queued work, then follow another schedule."""
    extension().follow(schedule.policy, schedule.number, schedule.last)


def use_lifetime(lifetime: Lifetime) -> None:
    """Let all process groups treat the tensors of collectives in this way from now on."""
    extension().use_lifetime(lifetime)


def poison(on: bool) -> None:
    """Fill memory that is handed out with NaN before its first use, or no longer."""
    extension().poison(on)


def counts() -> dict[str, Any]:
    """Return numbers of queued operators, inferences of layouts and executed tasks, and waits of the host by reason."""
    return dict(extension().counts())


def start_trace() -> None:
    """Start to record the work that the host issues."""
    extension().start_trace()


def stop_trace() -> list[Access]:
    """Return the work that the host has issued since `start_trace`."""
    return [Access(*record) for record in extension().stop_trace()]


def trace_size() -> int:
    """Return the number of entries of the trace since `start_trace`."""
    return int(extension().trace_size())


def host_access(name: str, begin: int, size_bytes: int, *, write: bool) -> None:
    """Record an access of the host at an address, if the memory is pinned."""
    extension().host_access(name, begin, size_bytes, write)


def _fork_rng(fork_rng: Any, devices: Any = None, enabled: bool = True, *args: Any, **options: Any) -> Any:
    """Fork the generators of other devices: random numbers of this one are the CPU's.

    The schedules of torch.distributed.pipelining fork the generators of the device of their stages.
    """
    if options.get("device_type") == NAME:
        return fork_rng([], enabled)
    return fork_rng(devices, enabled, *args, **options)


def make_backend(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the backend of a process group: torch asks for that of a new group, the extension for that of a split."""
    return extension().make_backend(dist.ProcessGroupGloo(store, rank, size, timeout), timeout // _MILLISECOND)
