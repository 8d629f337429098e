"""Caching allocator of CUDA against its model: `python -m benchmarks.allocator_history record|replay FILE`.

`record` needs a CUDA device: it trains a small model in one process on two streams and leaves torch's history of the
allocator in FILE, from before the first allocation on. `replay` needs the simulated accelerator alone: it repeats the
history's allocations and releases there, and compares for each block the segment and the place in it, and each
segment's size. Exit status 1 if one differs: then the model is wrong, or the history did not begin with an empty
allocator.
"""

import argparse
import pickle
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conformance.instruments.allocator_snapshot import allocator_snapshot
from conformance.sim import device as simulated
from conformance.sim.building import device_library


class Placed(NamedTuple):
    """Place of a block, or a segment that was taken from the device."""

    segment: int
    """Number of the segment, in the order in which they were taken."""
    offset: int
    """First byte of the block in its segment."""
    size: int
    """Requested bytes of a block; bytes of a segment that was taken, whose offset is -1."""


def record(file: Path) -> None:
    """Leave the allocator's history of a small training run in a file; raises RuntimeError without a device."""
    if not torch.cuda.is_available():
        raise RuntimeError("`record` needs a CUDA device: there is none")
    device = torch.device("cuda", 0)
    with allocator_snapshot(file, device):
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, device=device) for _ in range(8)))
        optimizer = torch.optim.AdamW(model.parameters())
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for rows in (64, 300, 64):
            model(torch.randn(rows, 512, device=device)).square().mean().backward()
            with torch.cuda.stream(side):
                staged = torch.empty(rows * 40_000, device=device)
            staged.record_stream(torch.cuda.current_stream())
            del staged
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()


def history(file: Path) -> list[dict[str, Any]]:
    """Return the events of the first device that has any. Raises ValueError for a file without events."""
    with file.open("rb") as stream:
        traces = pickle.load(stream)["device_traces"]  # written by `record`, or by a law on memory
    for events in traces:
        if events:
            return list(events)
    raise ValueError(f"{file} has no events: record it with `python -m benchmarks.allocator_history record {file}`")


def placed_by_torch(events: Iterable[Mapping[str, Any]]) -> list[Placed]:
    """Return the blocks as torch's allocator has placed them, and the segments that it has taken, in order."""
    segments: dict[int, tuple[int, int]] = {}
    placed = []
    for event in events:
        address, size = event["addr"], event["size"]
        if event["action"] == "segment_alloc":
            segments[address] = (len(segments), size)
            placed.append(Placed(segments[address][0], -1, size))
        elif event["action"] == "alloc":
            begin = max((begin for begin in segments if begin <= address), default=None)
            number = -1 if begin is None else segments[begin][0]
            placed.append(Placed(number, 0 if begin is None else address - begin, size))
    return placed


def placed_by_model(events: Iterable[Mapping[str, Any]]) -> list[Placed]:
    """Return the same blocks as the simulated device places them, and the segments that it takes.

    A block is released when torch's allocator could hand it out again (`free_completed`), after all its streams.
    """
    streams: dict[int, torch.Stream] = {}
    blocks: dict[int, Tensor] = {}
    segments: dict[int, int] = {}
    placed = []
    for event in events:
        if event["action"] == "free_completed":
            blocks.pop(event["addr"], None)
        if event["action"] != "alloc":
            continue
        stream = _stream(streams, event["stream"])
        before = _reserved_bytes()
        with torch.get_device_module(simulated.NAME).stream(stream):
            block = torch.empty(event["size"], dtype=torch.uint8, device=simulated.device())
        taken = _reserved_bytes() - before
        if taken:
            segments[block.data_ptr()] = len(segments)
            placed.append(Placed(len(segments) - 1, -1, taken))
        begin = max(begin for begin in segments if begin <= block.data_ptr())
        placed.append(Placed(segments[begin], block.data_ptr() - begin, event["size"]))
        blocks[event["addr"]] = block
    return placed


def _stream(streams: dict[int, torch.Stream], number: int) -> torch.Stream:
    """Return the device's stream for one of the history, whose default stream is 0."""
    if number not in streams:
        module = torch.get_device_module(simulated.NAME)
        streams[number] = module.current_stream() if number == 0 else module.Stream()
    return streams[number]


def _reserved_bytes() -> int:
    return int(torch.accelerator.memory_stats(simulated.device())["reserved_bytes.all.current"])


def differences(measured: list[Placed], modelled: list[Placed]) -> list[str]:
    """Return a line for each entry that differs, and one if there are more entries on one side."""
    lines = [
        f"entry {index}: torch {torch_place}, model {model_place}"
        for index, (torch_place, model_place) in enumerate(zip(measured, modelled, strict=False))
        if torch_place != model_place
    ]
    if len(measured) != len(modelled):
        lines.append(f"torch has {len(measured)} entries, the model {len(modelled)}")
    return lines


def main() -> None:
    """Record or replay, as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("record", "replay"))
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    if options.what == "record":
        record(options.file)
        return
    events = history(options.file)
    simulated.load(device_library())
    measured, modelled = placed_by_torch(events), placed_by_model(events)
    lines = differences(measured, modelled)
    print("\n".join(lines[:20]))
    print(f"{len(measured)} blocks and segments, {len(lines)} differences")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
