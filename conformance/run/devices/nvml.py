"""CUDA devices of this machine, as NVML sees them.

NVML makes no CUDA context and needs no torch: pytest's own processes can ask it, and ranks can still be forked. What
the rest of the suite needs of it is `DeviceInterface`, which tests implement without a device.

https://docs.nvidia.com/deploy/nvml-api/, and for CUDA_VISIBLE_DEVICES
https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html
"""

import os
from collections.abc import Sequence
from typing import Protocol

import msgspec
import psutil
import pynvml

SESSION_VARIABLE = "CONFORMANCE_CONTROLLER"
"""The process id of a session's controller, in the environment of all its processes."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"


class Device(msgspec.Struct, frozen=True):
    """A CUDA device; `uuid` names it on every machine and in every process, such as `GPU-5fc5...`."""

    uuid: str
    name: str
    total_bytes: int


class DeviceProcess(msgspec.Struct, frozen=True):
    """A process with a context on a device; in a container NVML may not know its memory, nor its id in there."""

    pid: int
    used_bytes: int | None


class DeviceInterface(Protocol):
    """What the suite asks about devices."""

    def devices(self) -> tuple[Device, ...]:
        """All of the machine, in the order of their PCI addresses."""

    def used_bytes(self, uuid: str) -> int:
        """Memory of a device that is not free, whoever has it: "device level" in memory laws."""

    def processes(self, uuid: str) -> tuple[DeviceProcess, ...]:
        """Those that compute on a device."""

    def driver(self) -> str | None:
        """Version of the driver; None without one."""


class NvmlDevices:
    """The devices of a machine with NVIDIA's driver. Raises pynvml.NVMLError where that is none."""

    def __init__(self) -> None:
        pynvml.nvmlInit()

    def devices(self) -> tuple[Device, ...]:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            Device(
                uuid=pynvml.nvmlDeviceGetUUID(handle),
                name=pynvml.nvmlDeviceGetName(handle),
                total_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
            )
            for handle in handles
        )

    def used_bytes(self, uuid: str) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).used)

    def processes(self, uuid: str) -> tuple[DeviceProcess, ...]:
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        return tuple(DeviceProcess(one.pid, one.usedGpuMemory) for one in found)

    def driver(self) -> str | None:
        return str(pynvml.nvmlSystemGetDriverVersion())


class NoDevices:
    """A machine without NVIDIA's driver."""

    def devices(self) -> tuple[Device, ...]:
        return ()

    def used_bytes(self, uuid: str) -> int:
        raise ValueError(f"there is no device {uuid}: this machine has no NVIDIA driver")

    def processes(self, uuid: str) -> tuple[DeviceProcess, ...]:
        raise ValueError(f"there is no device {uuid}: this machine has no NVIDIA driver")

    def driver(self) -> str | None:
        return None


def machine_devices() -> DeviceInterface:
    """Those of this machine."""
    try:
        return NvmlDevices()
    except pynvml.NVMLError:
        return NoDevices()


def foreign_processes(interface: DeviceInterface, uuid: str) -> list[int]:
    """Ids of processes on a device that do not belong to this process's session.

    Those belong to it that have its controller among their ancestors, see `SESSION_VARIABLE`. A process that cannot be
    seen from here, such as one of another container, is foreign.
    """
    controller = int(os.environ.get(SESSION_VARIABLE, "0"))
    return [one.pid for one in interface.processes(uuid) if controller not in _lineage(one.pid)]


def _lineage(pid: int) -> list[int]:
    """A process and its ancestors."""
    try:
        process = psutil.Process(pid)
        return [pid, *(parent.pid for parent in process.parents())]
    except psutil.NoSuchProcess:
        return [pid]


def visible_devices(interface: DeviceInterface) -> tuple[Device, ...]:
    """Those that CUDA shows to a process with this environment, in its order. Raises ValueError, see `select`."""
    return select(interface.devices(), os.environ.get(VISIBLE), in_pci_order=os.environ.get(ORDER) == "PCI_BUS_ID")


def select(devices: Sequence[Device], visible: str | None, *, in_pci_order: bool) -> tuple[Device, ...]:
    """What `CUDA_VISIBLE_DEVICES=visible` leaves of a machine's devices; None: it is not set.

    Entries are indices or beginnings of UUIDs; as CUDA does it, the first one that names nothing ends the list.

    Raises ValueError for a device that is named twice, for part of a device (MIG), and for indices where it is unclear
    what they count: by default CUDA begins with the fastest device, NVML with the lowest PCI address.
    """
    if visible is None:
        return tuple(devices)
    found: list[Device] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.startswith("MIG-"):
            raise ValueError(f"{VISIBLE} is {visible}: parts of a device (MIG) are not supported, name whole devices")
        if entry.isdecimal() and not in_pci_order and len({device.name for device in devices}) > 1:
            raise ValueError(f"{VISIBLE} is {visible}, but devices differ: set {ORDER}=PCI_BUS_ID, or name UUIDs")
        device = _named(devices, entry)
        if device is None:
            break
        if device in found:
            raise ValueError(f"{VISIBLE} is {visible}: {entry} names a device a second time")
        found.append(device)
    return tuple(found)


def _named(devices: Sequence[Device], entry: str) -> Device | None:
    if entry.isdecimal():
        return devices[int(entry)] if int(entry) < len(devices) else None
    matching = [device for device in devices if entry.startswith("GPU-") and device.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None
