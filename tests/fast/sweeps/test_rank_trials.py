"""Calls that differ on one rank: their outcomes, and the versions that are recorded."""

import pytest

from conformance.sweeps import loud_faults
from conformance.sweeps.loud_faults import CHAPTERS, LoudFault, markdown, recorded, recorded_of
from conformance.sweeps.rank_trials import End, Outcome, RankEnd, outcome_of


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        ((End.RIGHT, End.RIGHT), Outcome.RIGHT),
        ((End.RAISED, End.RAISED), Outcome.LOUD),
        ((End.RAISED, End.DIED), Outcome.DIES),
        ((End.DIED, End.WAITED), Outcome.DIES),
        ((End.RAISED, End.RIGHT), Outcome.ALONE),
        ((End.RAISED, End.WAITED), Outcome.ALONE),
        ((End.WAITED, End.WRONG), Outcome.WAITS),
        ((End.RIGHT, End.WRONG), Outcome.WRONG),
        ((End.RIGHT, End.WAITED, End.RIGHT, End.WAITED), Outcome.GROUP_GOES_ON),
        ((End.WRONG, End.RAISED, End.RIGHT, End.DIED), Outcome.GROUP_GOES_ON),
        ((End.RIGHT, End.WAITED, End.WAITED, End.WAITED), Outcome.WAITS),
        ((End.RIGHT, End.RIGHT, End.RIGHT, End.WRONG), Outcome.WRONG),
    ],
)
def test_outcomes(ends: tuple[End, ...], outcome: Outcome) -> None:
    assert outcome_of(ends) is outcome
    assert outcome_of(ends[::-1]) is outcome


def test_a_call_is_worse_than_recorded_by_its_severity() -> None:
    loud = LoudFault("x", Outcome.LOUD, [RankEnd(End.RAISED), RankEnd(End.RAISED)])
    waits = LoudFault("x", Outcome.LOUD, [RankEnd(End.RAISED), RankEnd(End.WAITED)])
    other = LoudFault("x", Outcome.DIES, [RankEnd(End.WAITED), RankEnd(End.WAITED)])
    better = LoudFault("x", Outcome.WAITS, [RankEnd(End.RIGHT), RankEnd(End.RIGHT)])
    silent = LoudFault("x", Outcome.WAITS, [RankEnd(End.RIGHT), RankEnd(End.WRONG)])
    assert (loud.is_worse, waits.is_worse, other.is_worse, better.is_worse) == (False, True, False, False)
    assert silent.is_worse


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
