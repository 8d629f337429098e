"""Module `torch.sim`: the functions of a device module, by the names of `torch.cuda` and `torch.xpu`.

`torch.accelerator` offers most of them under names that serve every accelerator; these are for programs that ask for
the module of a device (`torch.get_device_module`). A device is an index, a `torch.device`, its text, or None for the
current one. Functions for random numbers are in `generators`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from conformance.sim.extension import NAME, extension

_initialized = False
"""Flag that torch.utils.checkpoint asks for before it keeps the states of generators; True if the devices have them."""
_in_use = False
default_generators: tuple[torch.Generator, ...] = ()
"""Default generator of each device; empty where the devices sample from the CPU's."""
Device = int | str | torch.device | None


class DeviceProperties(NamedTuple):
    """Properties of a simulated device."""

    name: str
    total_memory: int
    """Addressable memory in bytes; pages exist once they are written."""
    major: int = 8
    minor: int = 0
    multi_processor_count: int = 1


class _OfDevice(type):
    """Type of the classes whose instances are torch's own streams and events, as torch returns them everywhere."""

    def __instancecheck__(cls, instance: object) -> bool:
        base = cls.__mro__[1]
        return isinstance(instance, base) and instance.device.type == NAME  # type: ignore[attr-defined]


class Stream(torch.Stream, metaclass=_OfDevice):
    """Stream of a device; the schedule decides when its work runs. Priorities change nothing."""

    def __new__(cls, device: Device = None, priority: int = 0, **_: Any) -> torch.Stream:  # type: ignore[misc]
        """Return a new stream of the device."""
        return torch.Stream(device=chosen(device), priority=priority)


class Event(torch.Event, metaclass=_OfDevice):
    """Event of a device."""

    def __new__(  # type: ignore[misc]
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        """Return a new event, which has not been recorded."""
        return torch.Event(
            device=chosen(None), enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


class device:  # noqa: N801 - the name in torch.cuda
    """Context in which another device is the current one; None or a negative index changes nothing."""

    def __init__(self, device: Device) -> None:
        """Choose the device."""
        self._index = -1 if device is None else _index(device)
        self._before = -1

    def __enter__(self) -> None:
        """Make the device the current one."""
        if self._index >= 0:
            self._before = current_device()
            set_device(self._index)

    def __exit__(self, *_: object) -> None:
        """Make the former device the current one again."""
        if self._index >= 0:
            set_device(self._before)


class device_of(device):  # noqa: N801 - the name in torch.cuda
    """Context in which the device of a tensor is the current one; a tensor on the host changes nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Choose the device of the tensor."""
        super().__init__(tensor.device if tensor.device.type == NAME else None)


def is_available() -> bool:
    """Return True: a process that has this module has the device."""
    return True


def is_initialized() -> bool:
    """Return whether this process has used or chosen a device, or has only one.

    DeviceMesh makes the device of LOCAL_RANK the current one in processes that have not.
    """
    return _in_use or device_count() == 1


def init() -> None:
    """Say that this process uses its current device; devices need no initialisation by programs."""
    _lazy_init()


def device_count() -> int:
    """Return the number of devices that this machine appears to have."""
    return int(extension().device_count())


def current_device() -> int:
    """Return the index of the current device."""
    return torch.accelerator.current_device_index()


def set_device(device: Device) -> None:
    """Make a device the current one; a negative index changes nothing."""
    index = _index(device)
    if index >= 0:
        torch.accelerator.set_device_index(index)


def synchronize(device: Device = None) -> None:
    """Wait until the device has run all issued work."""
    torch.accelerator.synchronize(chosen(device))


def current_stream(device: Device = None) -> torch.Stream:
    """Return the stream on which the calling thread issues work for the device."""
    return torch.accelerator.current_stream(chosen(device))


def default_stream(device: Device = None) -> torch.Stream:
    """Return the default stream of the device."""
    index = chosen(device).index
    return torch.Stream(stream_id=0, device_index=index, device_type=_device_type_number())


def set_stream(stream: torch.Stream) -> None:
    """Make a stream, and its device, the current one."""
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Open a context in which a stream, and its device, is the current one; None changes nothing."""
    if stream is None:
        yield
        return
    device_before, before = current_device(), torch.accelerator.current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)
        set_device(device_before)


def memory_stats(device: Device = None) -> dict[str, Any]:
    """Return the statistics of the caching allocator, by the names of `torch.cuda.memory_stats`, in bytes."""
    return dict(torch.accelerator.memory_stats(chosen(device)))


def memory_allocated(device: Device = None) -> int:
    """Return the bytes of allocated blocks."""
    return int(torch.accelerator.memory_allocated(chosen(device)))


def max_memory_allocated(device: Device = None) -> int:
    """Return the peak of allocated bytes."""
    return int(torch.accelerator.max_memory_allocated(chosen(device)))


def memory_reserved(device: Device = None) -> int:
    """Return the bytes of segments."""
    return int(torch.accelerator.memory_reserved(chosen(device)))


def max_memory_reserved(device: Device = None) -> int:
    """Return the peak of reserved bytes."""
    return int(torch.accelerator.max_memory_reserved(chosen(device)))


def reset_peak_memory_stats(device: Device = None) -> None:
    """Make the present values of the statistics their peaks."""
    torch.accelerator.reset_peak_memory_stats(chosen(device))


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Set the totals of allocations and releases to zero."""
    torch.accelerator.reset_accumulated_memory_stats(chosen(device))


def empty_cache() -> None:
    """Return the segments without blocks in use, of all devices, to the machine."""
    torch.accelerator.empty_cache()


def memory_snapshot(device: Device = None) -> list[dict[str, Any]]:
    """Return the segments of the allocator with their blocks, in the form of `torch.cuda.memory_snapshot`."""
    return list(extension().snapshot(chosen(device).index))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the bytes that are not reserved, and all bytes, of the device."""
    total_bytes = get_device_properties(device).total_memory
    return total_bytes - memory_reserved(device), total_bytes


def get_device_properties(device: Device = None) -> DeviceProperties:
    """Return the properties of the device."""
    chosen(device)
    return DeviceProperties(get_device_name(device), int(extension().MEMORY_BYTES))


def get_device_name(device: Device = None) -> str:
    """Return the name of the device."""
    return f"simulated device {chosen(device).index}"


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """Return the compute capability whose choices of kernels the device follows, see docs/simulated_accelerator.md."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that `torch.autocast` takes for the device."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    """Return True: bfloat16 is computed as on the CPU."""
    return True


def _is_in_bad_fork() -> bool:
    return bool(extension().is_in_bad_fork())


def _lazy_init() -> None:
    """Note the first use of a device: torch calls this function before it makes a tensor or chooses a device."""
    global _in_use
    _in_use = True


def manual_seed_all(seed: int) -> None:
    """Seed the default generator of each device; `torch.manual_seed` calls this function."""
    for index in range(device_count()):
        default_generator(index).manual_seed(seed)


def default_generator(device: Device = None) -> torch.Generator:
    """Return the default generator of the device: the CPU's where the device samples from that one."""
    generator: torch.Generator = extension().default_generator(chosen(device).index)
    return generator


def _index(device: Device) -> int:
    if isinstance(device, int):
        return device
    return chosen(device).index


def chosen(device: Device) -> torch.device:
    """Return a device with its index, the current device for None. Raises ValueError for a device of another type."""
    given = torch.device(NAME, device) if isinstance(device, int) else torch.device(device or NAME)
    if given.type != NAME:
        raise ValueError(f"Expected a {NAME} device, but got: {given}")
    return given if given.index is not None else torch.device(NAME, current_device())


def _device_type_number() -> int:
    return int(torch.accelerator.current_stream(chosen(None)).device_type)
