"""Simulated device as the accelerator of a process, under the name `sim`.

A process gets the device after its last fork, permanently: torch allows one device of this kind (PrivateUse1).
`_DeviceModule` has only the functions that torch calls on a device module.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
from conformance.numerics.device_operators import SIMULATED, fused_norms
from conformance.sim.building import MODULE
from conformance.sim.schedules import Schedule
from conformance.sim.trace import Access

NAME = SIMULATED
"""Type of the device."""
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
def load(library: Path) -> ModuleType:
    """Make the device the accelerator of this process; returns the extension module.

    Raises RuntimeError if the process has another accelerator of this kind.
    """
    extension = load_module(MODULE, library)
    rename_privateuse1_backend(NAME)
    # A device module has no public way in.
    torch._register_device_module(NAME, _DeviceModule())  # type: ignore[no-untyped-call]
    generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    dist.Backend.register_backend(BACKEND, _make_backend, devices=[NAME])
    torch.random.fork_rng = partial(_fork_rng, torch.random.fork_rng)
    if norms := fused_norms():
        _kept.append(norms)
        extension.fuse_norms()
    return extension


def device() -> torch.device:
    """Return the only device."""
    return torch.device(NAME, 0)


def follow(schedule: Schedule) -> None:
    """Run all queued work, then follow another schedule."""
    _extension().follow(schedule.policy, schedule.number, schedule.number)


def use_lifetime(lifetime: Lifetime) -> None:
    """Let all process groups treat the tensors of collectives in this way from now on."""
    _extension().use_lifetime(lifetime)


def poison(on: bool) -> None:
    """Fill memory that is handed out with NaN before its first use, or no longer."""
    _extension().poison(on)


def counts() -> dict[str, Any]:
    """Return the numbers of queued operators and of executed tasks, and of waits of the host by reason."""
    return dict(_extension().counts())


def start_trace() -> None:
    """Start to record the work that the host issues."""
    _extension().start_trace()


def stop_trace() -> list[Access]:
    """Return the work that the host has issued since `start_trace`."""
    return [Access(*record) for record in _extension().stop_trace()]


def trace_size() -> int:
    """Return the number of entries of the trace since `start_trace`."""
    return int(_extension().trace_size())


def host_access(name: str, begin: int, size_bytes: int, *, write: bool) -> None:
    """Record an access of the host at an address, if the memory is pinned."""
    _extension().host_access(name, begin, size_bytes, write)


def _extension() -> Any:
    extension = sys.modules.get(MODULE)
    if extension is None:
        raise RuntimeError("this process has no simulated device: call conformance.sim.device.load first")
    return extension


def _fork_rng(fork_rng: Any, devices: Any = None, enabled: bool = True, *args: Any, **options: Any) -> Any:
    """Fork the generators of other devices: random numbers of this one are the CPU's.

    The device module cannot have `get_rng_state` and `set_rng_state` for this: a device that has them is one with
    Philox generators to DTensor (`is_rng_supported_mesh` in torch/distributed/tensor/_random.py). The schedules of
    torch.distributed.pipelining fork the generators of the device of their stages.
    """
    if options.get("device_type") == NAME:
        return fork_rng([], enabled)
    return fork_rng(devices, enabled, *args, **options)


def _make_backend(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return _extension().make_backend(dist.ProcessGroupGloo(store, rank, size, timeout), timeout // _MILLISECOND)


class _DeviceModule(ModuleType):
    """Module `torch.sim`, with the functions that FSDP, DeviceMesh and autocast call on the module of a device."""

    def __init__(self) -> None:
        super().__init__(f"torch.{NAME}")

    @staticmethod
    def Stream(device: Any = None, priority: int = 0, **_: Any) -> torch.Stream:  # noqa: N802 (as in torch.cuda)
        return torch.Stream(device=globals()["device"](), priority=priority)

    @staticmethod
    def Event(*_: Any, **__: Any) -> torch.Event:  # noqa: N802 (as in torch.cuda)
        return torch.Event(device=device())

    @staticmethod
    def current_stream(_: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device())

    @staticmethod
    @contextmanager
    def stream(stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = torch.accelerator.current_stream(device())
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def set_device(_: Any) -> None:
        """Do nothing: there is one device."""

    @staticmethod
    def synchronize(_: Any = None) -> None:
        torch.accelerator.synchronize(device())

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def _lazy_init() -> None:
        """Do nothing: torch.accelerator of torch 2.11 synchronizes only devices whose module has this function."""

    @staticmethod
    def manual_seed_all(_: int) -> None:
        """Do nothing: random numbers are the CPU's, whose generator torch.manual_seed has seeded already."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]
