"""Calls that differ on one rank: their outcomes, the versions that are recorded, and children that end in any way."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from conformance.sweeps import loud_faults, rank_trials
from conformance.sweeps.loud_faults import CHAPTERS, LoudFault, markdown, recorded, recorded_of
from conformance.sweeps.rank_trials import End, OddWorld, Outcome, RankEnd, in_child, outcome_of


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        ((End.RIGHT, End.RIGHT), Outcome.RIGHT),
        ((End.RAISED, End.RAISED), Outcome.LOUD),
        ((End.RAISED, End.DIED), Outcome.DIES),
        ((End.RAISED, End.RIGHT), Outcome.PARTLY),
        ((End.RAISED, End.WRONG), Outcome.PARTLY),
        ((End.DIED, End.WAITED), Outcome.LEFT_WAITING),
        ((End.WAITED, End.WRONG), Outcome.WAITS),
        ((End.RIGHT, End.WRONG), Outcome.WRONG),
    ],
)
def test_outcomes(ends: tuple[End, ...], outcome: Outcome) -> None:
    assert outcome_of(ends) is outcome
    assert outcome_of(ends[::-1]) is outcome


def test_a_call_is_worse_than_recorded_by_its_severity() -> None:
    loud = LoudFault("x", Outcome.LOUD, [RankEnd(End.RAISED), RankEnd(End.RAISED)])
    waits = LoudFault("x", Outcome.LOUD, [RankEnd(End.RAISED), RankEnd(End.WAITED)])
    better = LoudFault("x", Outcome.WAITS, [RankEnd(End.RIGHT), RankEnd(End.RIGHT)])
    assert (loud.is_worse, waits.is_worse, better.is_worse) == (False, True, False)


def test_a_version_is_judged_by_the_newest_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"2.13.0": {"x": Outcome.LOUD}, "2.15.0": {"x": Outcome.WAITS}}
    monkeypatch.setattr(loud_faults, "recorded", lambda: known)
    assert [recorded_of(each)["x"] for each in ("2.12.0", "2.13.1", "2.14.0", "2.16.0+cpu")] == [
        Outcome.LOUD,
        Outcome.LOUD,
        Outcome.LOUD,
        Outcome.WAITS,
    ]


def test_every_call_is_recorded_on_every_version_and_stands_in_the_page() -> None:
    names = [name for calls in CHAPTERS.values() for name in calls]
    assert len(names) == len(set(names))
    for outcomes in recorded().values():
        assert outcomes.keys() == set(names)
    page = markdown(recorded())
    assert all(f"| {name} " in page for name in names)


def _right(_world: OddWorld) -> Mapping[str, str]:
    return {}


def _wrong(_world: OddWorld) -> Mapping[str, str]:
    return {"sum": "3, expected 2"}


def _raises(_world: OddWorld) -> Mapping[str, str]:
    raise ValueError("no")


def _dies(_world: OddWorld) -> Mapping[str, str]:
    os.abort()


def _waits(world: OddWorld) -> Mapping[str, str]:
    import time

    time.sleep(60.0 * world.size)
    return {}


@pytest.mark.parametrize(
    ("call", "end"),
    [(_right, End.RIGHT), (_wrong, End.WRONG), (_raises, End.RAISED), (_dies, End.DIED), (_waits, End.WAITED)],
)
def test_a_child_ends_as_its_call_does(
    call: rank_trials.OddCall, end: End, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_trials, "_DEADLINE_S", 1.0)
    assert in_child(call, OddWorld(0, 1, tmp_path, 0.5)).end is end
