"""Children that make a call which differs on one rank, and end in any way."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from conformance.sweeps import rank_trials
from conformance.sweeps.rank_trials import End, OddCall, OddWorld, in_child


def _right(_world: OddWorld) -> Mapping[str, str]:
    return {}


def _wrong(_world: OddWorld) -> Mapping[str, str]:
    return {"sum": "3, expected 2"}


def _raises(_world: OddWorld) -> Mapping[str, str]:
    raise ValueError("no")


def _dies(_world: OddWorld) -> Mapping[str, str]:
    os.abort()


def _waits(world: OddWorld) -> Mapping[str, str]:
    time.sleep(60.0 * world.size)
    return {}


@pytest.mark.parametrize(
    ("call", "end"),
    [(_right, End.RIGHT), (_wrong, End.WRONG), (_raises, End.RAISED), (_dies, End.DIED), (_waits, End.WAITED)],
)
def test_a_child_ends_as_its_call_does(
    call: OddCall, end: End, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if end is End.WAITED:  # the others end by themselves, which may take seconds on a busy machine
        monkeypatch.setattr(rank_trials, "_DEADLINE_S", 1.0)
    assert in_child(call, OddWorld(0, 1, tmp_path, 0.5)).end is end
