"""Probes of copies within the device, and between host and device."""

from collections.abc import Mapping

import torch
from torch import Tensor

from conformance.sim_runs.fidelity.probes.device_work import current_stream, new_stream, occupy, waits
from conformance.sim_runs.fidelity.rules import Fact

_NUMEL = 1 << 20


def _host(*, pinned: bool, value: float = 1.0) -> Tensor:
    return torch.full((_NUMEL,), value, pin_memory=pinned)


def _device(device: torch.device) -> Tensor:
    return torch.zeros(_NUMEL, device=device)


def _blocking_copies(device: torch.device) -> Mapping[str, Fact]:
    on_device, pageable, pinned = _device(device), _host(pinned=False), _host(pinned=True)
    return {
        "pageable to device": waits(device, lambda: on_device.copy_(pageable)),
        "device to pageable": waits(device, lambda: pageable.copy_(on_device)),
        "pinned to device": waits(device, lambda: on_device.copy_(pinned)),
        "device to pinned": waits(device, lambda: pinned.copy_(on_device)),
    }


def _wait_for_one_stream(device: torch.device) -> Mapping[str, Fact]:
    on_device, host, other = _device(device), _host(pinned=False), new_stream(device)
    torch.accelerator.synchronize(device)
    occupy(other)
    host.copy_(on_device)
    held_up = other.query()
    other.synchronize()
    return {"waits for other streams": held_up}


def _pinned_to_device(device: torch.device) -> Mapping[str, Fact]:
    waited, value = _value_after_a_change(device, _host(pinned=True))
    return {"the host waits": waited, "reads the host's memory in its turn": value == 2}


def _pageable_to_device(device: torch.device) -> Mapping[str, Fact]:
    waited, value = _value_after_a_change(device, _host(pinned=False))
    return {"reads the host's memory in its turn": value == 2, "the host waits (free to either)": waited}


def _strided_pinned_to_device(device: torch.device) -> Mapping[str, Fact]:
    _, value = _value_after_a_change(device, torch.full((2 * _NUMEL,), 1.0, pin_memory=True)[::2])
    return {"reads the host's memory in its turn": value == 2}


def _value_after_a_change(device: torch.device, host: Tensor) -> tuple[bool, float]:
    """Copy ones that the host overwrites with twos at once; returns whether the host waited, and the copied number."""
    on_device = _device(device)
    stream = current_stream(device)
    stream.synchronize()
    occupy(stream)
    on_device.copy_(host, non_blocking=True)
    waited = stream.query()
    host.fill_(2)
    stream.synchronize()
    return waited, on_device[0].item()


def _device_to_pinned(device: torch.device) -> Mapping[str, Fact]:
    on_device, host = _device(device).fill_(3), _host(pinned=True)
    stream = current_stream(device)
    stream.synchronize()
    occupy(stream)
    host.copy_(on_device, non_blocking=True)
    waited, early = stream.query(), host[0].item()
    stream.synchronize()
    return {"the host waits": waited, "written at once": early == 3, "written afterwards": host[0].item() == 3}


def _device_to_pageable(device: torch.device) -> Mapping[str, Fact]:
    on_device, host = _device(device), _host(pinned=False)
    return {"the host waits": waits(device, lambda: host.copy_(on_device, non_blocking=True))}


def _within_device(device: torch.device) -> Mapping[str, Fact]:
    first, second = _device(device), _device(device)
    return {"the host waits": waits(device, lambda: first.copy_(second))}


def _peer_copies(device: torch.device) -> Mapping[str, Fact]:
    """Return nothing on a machine with one device."""
    if torch.accelerator.device_count() < 2:
        return {}
    peer = torch.device(device.type, 1)
    here, there = torch.ones(_NUMEL, device=device), torch.zeros(_NUMEL, device=peer)
    there.copy_(here)  # the driver connects the devices
    facts: dict[str, Fact] = {}
    for name, busy, other in (("source", device, peer), ("target", peer, device)):
        torch.accelerator.synchronize(device)
        torch.accelerator.synchronize(peer)
        occupy(current_stream(busy))
        there.copy_(here)
        facts[f"the host waits for the {name}"] = current_stream(busy).query()
        facts[f"the other stream waits for the {name}'s"] = not current_stream(other).query()
    return facts


PROBES = {
    "blocking-copies": _blocking_copies,
    "copies-wait-for-one-stream": _wait_for_one_stream,
    "pinned-to-device": _pinned_to_device,
    "pageable-to-device": _pageable_to_device,
    "strided-copies": _strided_pinned_to_device,
    "device-to-pinned": _device_to_pinned,
    "device-to-pageable": _device_to_pageable,
    "copies-within-the-device": _within_device,
    "peer-copies": _peer_copies,
}
