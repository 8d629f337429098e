"""Replay of an allocator's history on the simulated device, with histories that follow CUDA's rules or break them."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from benchmarks.allocator_history import Placed, differences, history, placed_by_model, placed_by_torch
from tests.support.simulated_processes import exit_code

MEBI = 1 << 20
SMALL, LARGE = 0x7000_0000_0000, 0x7100_0000_0000
"""Addresses of a segment for blocks up to 1 MiB, and of one for larger blocks."""


def event(action: str, addr: int, size: int, *, stream: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": stream}


EVENTS = [
    event("segment_alloc", SMALL, 2 * MEBI),
    event("alloc", SMALL, 100),
    event("alloc", SMALL + 512, 1000),
    event("free_requested", SMALL, 100),
    event("free_completed", SMALL, 100),
    event("alloc", SMALL, 512),  # the hole fits
    event("segment_alloc", LARGE, 20 * MEBI),
    event("alloc", LARGE, 5 * MEBI),
    event("alloc", LARGE + 5 * MEBI, 2 * MEBI),
]


def test_the_places_of_a_history() -> None:
    assert placed_by_torch(EVENTS)[:3] == [Placed(0, -1, 2 * MEBI), Placed(0, 0, 100), Placed(0, 512, 1000)]
    assert placed_by_torch(EVENTS)[4:6] == [Placed(1, -1, 20 * MEBI), Placed(1, 0, 5 * MEBI)]


def follows_the_rules() -> None:
    assert differences(placed_by_torch(EVENTS), placed_by_model(EVENTS)) == []


def breaks_them() -> None:
    late = [{**e, "addr": e["addr"] + 1024} if e is EVENTS[5] else e for e in EVENTS]
    (line,) = differences(placed_by_torch(late), placed_by_model(late))
    assert line.startswith("entry 3: torch Placed(segment=0, offset=1024")


def has_streams_of_their_own() -> None:
    """Another stream's block is in a second segment, although the first has room."""
    events = [EVENTS[0], EVENTS[1], event("segment_alloc", LARGE, 2 * MEBI), event("alloc", LARGE, 100, stream=7)]
    assert differences(placed_by_torch(events), placed_by_model(events)) == []


@pytest.mark.parametrize("check", [follows_the_rules, breaks_them, has_streams_of_their_own])
def test_replay(check: Any) -> None:
    assert exit_code(check) == 0


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "history.pickle"
    file.write_bytes(pickle.dumps({"device_traces": [[], EVENTS]}))
    assert history(file) == EVENTS
    file.write_bytes(pickle.dumps({"device_traces": [[], []]}))
    with pytest.raises(ValueError, match="has no events: record it"):
        history(file)
