"""Probes of the caching allocator of the device, and of that of pinned memory."""

import ctypes
import os
from collections.abc import Mapping

import torch
from torch import Tensor

from conformance.sim_runs.fidelity.probes.device_work import (
    MIB,
    count,
    current_stream,
    growth,
    new_stream,
    occupy,
    on,
    release_cached,
    settled,
    taken,
)
from conformance.sim_runs.fidelity.rules import Fact

_BLOCK = 4096
"""Bytes of a block of the small pool."""


def _growth(device: torch.device, statistic: str, size_bytes: int) -> int:
    """Return by how much a block raises a statistic while it is in use."""
    return growth(device, statistic, lambda: taken(device, size_bytes))


def _rounding(device: torch.device) -> Mapping[str, Fact]:
    with settled(device):
        return {f"bytes for {size}": _growth(device, "allocated_bytes", size) for size in (1, 512, 513)}


def _no_bytes(device: torch.device) -> Mapping[str, Fact]:
    with settled(device):
        return {
            "address": taken(device, 0).data_ptr(),
            "allocations": _growth(device, "allocation", 0),
        }


def _segments(device: torch.device) -> Mapping[str, Fact]:
    sizes = {"1 MiB": MIB, "1 MiB + 1": MIB + 1, "10 MiB - 512": 10 * MIB - 512, "10 MiB": 10 * MIB, "11 MiB": 11 * MIB}
    facts = {}
    for name, size in sizes.items():
        with settled(device):
            facts[f"segment in MiB for {name}"] = _growth(device, "reserved_bytes", size) // MIB
    return facts


def _pools_of_sizes(device: torch.device) -> Mapping[str, Fact]:
    with settled(device):
        taken(device, 2 * MIB)  # leaves a free segment of 20 MiB
        return {
            "reserved MiB for a small block beside a free large segment": _growth(device, "reserved_bytes", 512) // MIB
        }


def _splitting(device: torch.device) -> Mapping[str, Fact]:
    with settled(device):
        first, second = taken(device, 512), taken(device, 512)
        offset = second.data_ptr() - first.data_ptr()
        del first, second
        taken(device, 2 * MIB)  # leaves a free segment of 20 MiB
        return {
            "offset of the second small block": offset,
            "MiB of a block of 19 MiB in a segment of 20": _growth(device, "allocated_bytes", 19 * MIB) // MIB,
            "MiB of a block of 18 MiB in a segment of 20": _growth(device, "allocated_bytes", 18 * MIB) // MIB,
        }


def _best_fit(device: torch.device) -> Mapping[str, Fact]:
    with settled(device):
        large, _first, small, _second, other = (taken(device, size) for size in (8192, 512, _BLOCK, 512, _BLOCK))
        _last = taken(device, 512)
        places = {"large": large.data_ptr(), "small": small.data_ptr()}
        del large, small, other
        block = taken(device, 2048)
        return {"smallest block that fits": block.data_ptr() == places["small"]}


def _merging(device: torch.device) -> Mapping[str, Fact]:
    with settled(device):
        blocks = [taken(device, _BLOCK) for _ in range(3)]
        _last = taken(device, 512)
        address = blocks[0].data_ptr()
        while blocks:
            blocks.pop()
        return {"neighbours are one block": taken(device, 3 * _BLOCK).data_ptr() == address}


def _segments_apart(device: torch.device) -> Mapping[str, Fact]:
    with settled(device):
        segments = [taken(device, 10 * MIB) for _ in range(2)]
        segments.clear()
        return {
            "reserved MiB for 20 MiB beside two free segments of 10": _growth(device, "reserved_bytes", 20 * MIB) // MIB
        }


def _reuse_on_its_stream(device: torch.device) -> Mapping[str, Fact]:
    with settled(device) as stream:
        block = taken(device, _BLOCK)
        address = block.data_ptr()
        occupy(stream)
        del block
        again = taken(device, _BLOCK)
        return {"same address": again.data_ptr() == address, "while the stream is busy": not stream.query()}


def _pools_of_streams(device: torch.device) -> Mapping[str, Fact]:
    with settled(device):
        block = taken(device, _BLOCK)
        address = block.data_ptr()
        del block
        with on(new_stream(device)):
            return {"same address on another stream": taken(device, _BLOCK).data_ptr() == address}


def _recorded_stream(device: torch.device) -> Mapping[str, Fact]:
    with settled(device):
        other = new_stream(device)
        block = taken(device, _BLOCK)
        address, active = block.data_ptr(), count(device, "active_bytes")
        block.record_stream(other)
        occupy(other)
        del block
        early = taken(device, _BLOCK)
        other.synchronize()
        held = count(device, "active_bytes") - active == _BLOCK
        afterwards = taken(device, _BLOCK)
        return {
            "handed out while the recorded stream is busy": early.data_ptr() == address,
            "active until memory is asked for": held,
            "handed out afterwards": afterwards.data_ptr() == address,
        }


def _recorded_until_the_release(device: torch.device) -> Mapping[str, Fact]:
    with settled(device):
        other = new_stream(device)
        block = taken(device, _BLOCK)
        address = block.data_ptr()
        with on(other):
            block.fill_(0)
        block.record_stream(other)
        del block
        released = other.record_event()
        occupy(other)
        released.synchronize()
        again = taken(device, _BLOCK)
        return {"handed out": again.data_ptr() == address, "while the recorded stream is busy": not other.query()}


def _recorded_own_stream(device: torch.device) -> Mapping[str, Fact]:
    with settled(device) as stream:
        block = taken(device, _BLOCK)
        address = block.data_ptr()
        block.record_stream(stream)
        occupy(stream)
        del block
        return {"handed out at once": taken(device, _BLOCK).data_ptr() == address}


def _statistics(device: torch.device) -> Mapping[str, Fact]:
    with settled(device):
        other = new_stream(device)
        before = count(device, "requested_bytes")
        block = taken(device, 1)
        requested = count(device, "requested_bytes") - before
        block.record_stream(other)
        occupy(other)
        del block
        pending = count(device, "requested_bytes") - before
    with settled(device):
        before = count(device, "allocated_bytes")
        torch.accelerator.reset_peak_memory_stats(device)
        after_reset = count(device, "allocated_bytes", over="peak") - before
        taken(device, _BLOCK)
        peak = count(device, "allocated_bytes", over="peak") - before
    return {
        "requested bytes for 1": requested,
        "requested bytes of a released block whose recorded stream is busy": pending,
        "peak after a reset, above the current": after_reset,
        "peak after a block that is released": peak,
    }


def _statistics_of_pools(device: torch.device) -> Mapping[str, Fact]:
    with settled(device):
        block = taken(device, _BLOCK)
        statistics = torch.accelerator.memory_stats(device)
        del block
    return {
        "counts the small pool": int(statistics.get("allocated_bytes.small_pool.current", 0)) >= _BLOCK,
        "counts inactive blocks": int(statistics.get("inactive_split_bytes.all.current", 0)) > 0,
    }


def _emptied_cache(device: torch.device) -> Mapping[str, Fact]:
    with settled(device) as stream:
        before = count(device, "reserved_bytes")
        block = taken(device, _BLOCK)  # keeps its segment
        taken(device, 10 * MIB)
        occupy(stream)
        torch.accelerator.empty_cache()
        waited = stream.query()
        kept = count(device, "reserved_bytes") - before
        other = new_stream(device)
        block.record_stream(other)
        occupy(other)
        del block
        torch.accelerator.empty_cache()
        return {
            "waits for a busy stream (free to either)": waited,
            "reserved MiB with a block in use": kept // MIB,
            "waits for recorded streams": other.query(),
            "reserved MiB without": (count(device, "reserved_bytes") - before) // MIB,
        }


def _hidden_memory(device: torch.device) -> Mapping[str, Fact]:
    """Return whether the host can read the device's memory: `write` refuses a source that it cannot."""
    block = torch.ones(1, dtype=torch.uint8, device=device)
    release_cached(device)
    libc = ctypes.CDLL(None, use_errno=True)
    reader, writer = os.pipe()
    written = libc.write(writer, ctypes.c_void_p(block.data_ptr()), ctypes.c_size_t(1))
    os.close(reader)
    os.close(writer)
    return {"the host reads it": written == 1}


def _pinned(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


def _gets_its_memory(first_bytes: int, second_bytes: int) -> bool:
    """Return whether pinned memory that is released is handed out again for another size."""
    block = _pinned(first_bytes)
    address = block.data_ptr()
    del block
    return _pinned(second_bytes).data_ptr() == address


def _pinned_sizes(device: torch.device) -> Mapping[str, Fact]:
    torch.accelerator.synchronize(device)
    return {
        "3 MiB for 4 MiB": _gets_its_memory(3 * MIB, 4 * MIB),
        "4 MiB for 2 MiB": _gets_its_memory(4 * MIB, 2 * MIB),
        "100 bytes for 512": _gets_its_memory(100, 512),
        "100 bytes for 128": _gets_its_memory(100, 128),
    }


def _pinned_reuse(device: torch.device) -> Mapping[str, Fact]:
    stream = current_stream(device)
    torch.accelerator.synchronize(device)
    target = taken(device, 3 * MIB)
    host = _pinned(3 * MIB)
    address = host.data_ptr()
    occupy(stream)
    target.copy_(host, non_blocking=True)
    copied = stream.record_event()
    occupy(stream)
    copied.synchronize()
    del host
    busy = not stream.query()
    early = _pinned(3 * MIB)
    stream.synchronize()
    afterwards = _pinned(3 * MIB)
    return {
        "handed out after the copy while its stream is busy": early.data_ptr() == address,
        "the stream was busy": busy,
        "handed out afterwards": afterwards.data_ptr() == address,
    }


PROBES = {
    "sizes-in-512-bytes": _rounding,
    "no-bytes-no-block": _no_bytes,
    "segments": _segments,
    "pools-of-sizes": _pools_of_sizes,
    "splitting": _splitting,
    "best-fit": _best_fit,
    "merging": _merging,
    "segments-apart": _segments_apart,
    "reuse-on-its-stream": _reuse_on_its_stream,
    "pools-of-streams": _pools_of_streams,
    "recorded-stream": _recorded_stream,
    "recorded-until-the-release": _recorded_until_the_release,
    "recorded-own-stream": _recorded_own_stream,
    "statistics": _statistics,
    "statistics-of-pools": _statistics_of_pools,
    "emptied-cache": _emptied_cache,
    "hidden-memory": _hidden_memory,
    "pinned-sizes": _pinned_sizes,
    "pinned-reuse": _pinned_reuse,
}
