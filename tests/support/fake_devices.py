"""Devices of a simulated machine."""

from dataclasses import dataclass, field

from conformance.run.devices.nvml import Device, DeviceProcess


def some_devices(count: int, *, name: str = "Fake 1000") -> tuple[Device, ...]:
    return tuple(Device(uuid=f"GPU-{number}abc", name=name, total_bytes=80 << 30) for number in range(count))


@dataclass
class FakeDevices:
    """DeviceInterface with the devices and processes that a test gives."""

    present: tuple[Device, ...] = ()
    running: dict[str, list[int]] = field(default_factory=dict)

    def devices(self) -> tuple[Device, ...]:
        return self.present

    def used_bytes(self, _uuid: str) -> int:
        return 0

    def processes(self, uuid: str) -> tuple[DeviceProcess, ...]:
        return tuple(DeviceProcess(pid, None) for pid in self.running.get(uuid, []))

    def driver(self) -> str | None:
        return "999.1" if self.present else None
