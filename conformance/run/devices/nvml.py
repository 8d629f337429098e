"""CUDA devices of this machine, as NVML reports them.

NVML makes no CUDA context and needs no torch: pytest's own processes can use it, and ranks can still be forked. The
suite uses NVML through `DeviceInterface`, which tests implement without a device.

https://docs.nvidia.com/deploy/nvml-api/, and for CUDA_VISIBLE_DEVICES
https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html
"""

import os
from collections.abc import Sequence
from typing import Protocol

import msgspec
import psutil
import pynvml

from reference_trainer.checks import UsageError

SESSION_VARIABLE = "CONFORMANCE_CONTROLLER"
"""Variable with the process id of a session's controller, in the environment of all processes of the session."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"


class Device(msgspec.Struct, frozen=True):
    """CUDA device with a UUID, such as `GPU-5fc5...`, that is the same on every machine and in every process."""

    uuid: str
    name: str
    total_bytes: int
    is_exclusive: bool = False
    """True if its compute mode allows one process, or none."""


class DeviceProcess(msgspec.Struct, frozen=True):
    """Process with a context on a device; in a container NVML may know neither its memory nor its id in there."""

    pid: int
    used_bytes: int | None


class DeviceInterface(Protocol):
    """Interface for facts about devices."""

    def devices(self) -> tuple[Device, ...]:
        """Return all devices of the machine, in the order of their PCI addresses."""

    def used_bytes(self, uuid: str) -> int:
        """Return the bytes of a device that any process uses: "device level" in memory laws."""

    def processes(self, uuid: str) -> tuple[DeviceProcess, ...]:
        """Return the processes that compute on a device."""

    def driver(self) -> str | None:
        """Return the version of the driver, or None without a driver."""


class NvmlDevices:
    """DeviceInterface of a machine with NVIDIA's driver; raises pynvml.NVMLError on any other machine."""

    def __init__(self) -> None:
        pynvml.nvmlInit()

    def devices(self) -> tuple[Device, ...]:
        """See `DeviceInterface`."""
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            Device(
                uuid=pynvml.nvmlDeviceGetUUID(handle),
                name=pynvml.nvmlDeviceGetName(handle),
                total_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                is_exclusive=pynvml.nvmlDeviceGetComputeMode(handle) != pynvml.NVML_COMPUTEMODE_DEFAULT,
            )
            for handle in handles
        )

    def used_bytes(self, uuid: str) -> int:
        """See `DeviceInterface`."""
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).used)

    def processes(self, uuid: str) -> tuple[DeviceProcess, ...]:
        """See `DeviceInterface`."""
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        return tuple(DeviceProcess(process.pid, process.usedGpuMemory) for process in processes)

    def driver(self) -> str | None:
        """See `DeviceInterface`."""
        return str(pynvml.nvmlSystemGetDriverVersion())


class NoDevices:
    """DeviceInterface of a machine without NVIDIA's driver."""

    def devices(self) -> tuple[Device, ...]:
        """See `DeviceInterface`."""
        return ()

    def used_bytes(self, uuid: str) -> int:
        """See `DeviceInterface`; raises ValueError."""
        raise ValueError(f"there is no device {uuid}: this machine has no NVIDIA driver")

    def processes(self, uuid: str) -> tuple[DeviceProcess, ...]:
        """See `DeviceInterface`; raises ValueError."""
        raise ValueError(f"there is no device {uuid}: this machine has no NVIDIA driver")

    def driver(self) -> str | None:
        """See `DeviceInterface`."""
        return None


def machine_devices() -> DeviceInterface:
    """Return the interface to the devices of this machine."""
    try:
        return NvmlDevices()
    except pynvml.NVMLError:
        return NoDevices()


def foreign_processes(interface: DeviceInterface, uuid: str) -> list[int]:
    """Return the ids of processes on a device that do not belong to this process's session.

    Processes of a session have its controller among their ancestors, see `SESSION_VARIABLE`. An invisible process, such
    as a process of another container, is foreign.
    """
    controller = int(os.environ.get(SESSION_VARIABLE, "0"))
    return [process.pid for process in interface.processes(uuid) if controller not in _lineage(process.pid)]


def sees_process(interface: DeviceInterface, uuid: str, pid: int) -> bool:
    """Return whether a process that computes on a device is among those that NVML names.

    In a container NVML may name the ids that processes have outside.
    """
    return pid in (process.pid for process in interface.processes(uuid))


def _lineage(pid: int) -> list[int]:
    """Return the ids of a process and its ancestors."""
    try:
        process = psutil.Process(pid)
        return [pid, *(parent.pid for parent in process.parents())]
    except psutil.NoSuchProcess:
        return [pid]


def visible_devices(interface: DeviceInterface) -> tuple[Device, ...]:
    """Return the devices that CUDA shows to this process, in the order of CUDA; raises as `select` does."""
    return select(interface.devices(), os.environ.get(VISIBLE), in_pci_order=os.environ.get(ORDER) == "PCI_BUS_ID")


def select(devices: Sequence[Device], visible: str | None, *, in_pci_order: bool) -> tuple[Device, ...]:
    """Return the devices of a machine that `CUDA_VISIBLE_DEVICES=visible` shows; None: the variable is not set.

    Entries are indices or prefixes of UUIDs; as with CUDA, the first entry that names no device ends the list.

    Raises UsageError for a device that is named twice, for a slice of a device (MIG), and for indices with an unclear
    order: by default CUDA begins with the fastest device, NVML with the lowest PCI address.
    """
    if visible is None:
        return tuple(devices)
    selected: list[Device] = []
    for entry in map(str.strip, visible.split(",")):
        if entry.startswith("MIG-"):
            raise UsageError(f"{VISIBLE} is {visible}: slices of a device (MIG) are not supported; name full devices")
        if entry.isdecimal() and not in_pci_order and len({device.name for device in devices}) > 1:
            raise UsageError(f"{VISIBLE} is {visible}, but devices differ: set {ORDER}=PCI_BUS_ID, or name UUIDs")
        device = _named(devices, entry)
        if device is None:
            break
        if device in selected:
            raise UsageError(f"{VISIBLE} is {visible}: {entry} names a device a second time")
        selected.append(device)
    return tuple(selected)


def _named(devices: Sequence[Device], entry: str) -> Device | None:
    if entry.isdecimal():
        return devices[int(entry)] if int(entry) < len(devices) else None
    matching = [device for device in devices if entry.startswith("GPU-") and device.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None
