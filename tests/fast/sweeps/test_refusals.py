"""Refused calls of sweeps: kept by release, and no more allowed than before."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from conformance.cli.refusals import counted
from conformance.sweeps import refusals
from conformance.sweeps.refusals import (
    COMMUNICATING,
    REFUSED,
    CallCounts,
    newly_communicating,
    newly_refused,
    refused_on,
)

CASE = "DT-3/dp2"
NO_RULE = "NotImplementedError: no rule"


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> CallCounts:
    """Measure that 2.13 refuses `lgamma` twice and `prod` never, 2.14 refuses both, and 2.15 refuses `prod` alone."""
    kept = CallCounts(versions=[], counts={})
    kept = kept.put("2.15", {"prod": {NO_RULE: 1}})
    kept = kept.put("2.13", {"lgamma": {NO_RULE: 2}})
    kept = kept.put("2.14", {"lgamma": {NO_RULE: 2}, "prod": {NO_RULE: 1}})
    monkeypatch.setattr(refusals, "read_refusals", lambda: {CASE: kept})
    return kept


def test_releases_are_read_back_and_kept_as_changes(measured: CallCounts) -> None:
    assert measured.versions == ["2.13", "2.14", "2.15"]
    assert measured.counts == {
        "lgamma": {"2.13": {NO_RULE: 2}, "2.15": {}},
        "prod": {"2.14": {NO_RULE: 1}},
    }
    assert measured.on("lgamma", "2.14") == {NO_RULE: 2}
    assert measured.on("lgamma", "2.15") == {}


@pytest.mark.parametrize(
    ("version", "refused", "expected"),
    [
        ("2.13.0+cpu", {"lgamma": {NO_RULE: 2}}, ""),
        ("2.13.1", {"lgamma": {NO_RULE: 1}}, ""),
        ("2.13.0", {"lgamma": {NO_RULE: 3}}, "lgamma 1: not refused so on torch 2.13"),
        ("2.13.0", {"lgamma": {"RuntimeError: other": 1}}, "lgamma 1: not refused so on torch 2.13"),
        ("2.13.0", {"prod": {NO_RULE: 1}}, "prod 1: not refused so on torch 2.13"),
        ("2.14.1", {"prod": {NO_RULE: 1}}, "prod 1: computed on an earlier torch"),
        ("2.15.0", {"lgamma": {NO_RULE: 2}}, "lgamma 2: not refused so on torch 2.15"),
        ("2.16.0", {"prod": {NO_RULE: 1}}, "prod 1: computed on an earlier torch"),
        ("2.12.0", {"prod": {NO_RULE: 5}}, ""),
    ],
)
def test_more_refusals_than_on_any_measured_release_are_told(
    version: str, refused: dict[str, dict[str, int]], expected: str
) -> None:
    told = [f"{subject} {number}: {text}" for subject, number, text in newly_refused(CASE, refused, version)]
    assert [text for text in told if not text.startswith(expected)] == []
    assert len(told) == bool(expected)


def test_a_case_that_was_not_measured_has_no_bound() -> None:
    assert not [*newly_refused("DT-3/dp3", {"prod": {NO_RULE: 1}}, "2.13.0")]


@pytest.mark.parametrize(("defaults", "told"), [("Rprop(no option)", 0), ("RMSprop(no option)", 1)])
def test_an_option_was_not_tried_where_the_defaults_were_refused(
    monkeypatch: pytest.MonkeyPatch, defaults: str, told: int
) -> None:
    option = {"Rprop(capturable=True)": {NO_RULE: 1}}
    kept = CallCounts(versions=[], counts={}).put("2.13", {defaults: {NO_RULE: 1}}).put("2.15", option)
    monkeypatch.setattr(refusals, "read_refusals", lambda: {CASE: kept})
    assert len([*newly_refused(CASE, option, "2.15.0")]) == told


def test_errors_are_read_from_the_metrics_of_bounded_cases() -> None:
    bounded = {"calls of all subjects": 3, f"calls of prod: refused: {NO_RULE}": 2, "prod: refused": 3, "mm: wrong": 0}
    bounded["calls of norm: 2: communicate in forward"] = 4
    cases = [(CASE, bounded), ("DT-3/dp3", {"calls of all subjects": 0}), ("DT-2/dp2", {"mm: refused": 1})]
    report = SimpleNamespace(
        cases=[
            SimpleNamespace(id=case, measured={name: SimpleNamespace(value=float(n)) for name, n in metrics.items()})
            for case, metrics in cases
        ]
    )
    assert counted(cast("Any", report), REFUSED) == {CASE: {"prod": {NO_RULE: 2}}, "DT-3/dp3": {}}
    assert counted(cast("Any", report), COMMUNICATING) == {CASE: {"norm: 2": {"forward": 4}}, "DT-3/dp3": {}}


def test_a_tried_release_that_was_not_measured_has_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = CallCounts(versions=[], counts={}).put("2.13", {})
    monkeypatch.setattr(refusals, "read_refusals", lambda: {CASE: kept})
    refused = {"prod": {NO_RULE: 1}}
    found = [bool([*newly_refused(CASE, refused, version)]) for version in ("2.13.0", "2.14.1", "2.99.0")]
    assert found == [True, False, True]


@pytest.mark.parametrize(
    ("version", "subjects"), [("2.12.0", set()), ("2.14.1", {"lgamma", "prod"}), ("2.15", {"prod"})]
)
def test_known_refusals_are_those_of_the_last_measured_release(version: str, subjects: set[str]) -> None:
    assert refused_on(version) == subjects


@pytest.mark.parametrize(
    ("version", "refused", "passes", "expected"),
    [
        ("2.13.0", 2, {"forward": 3, "any pass": 5}, []),
        ("2.13.0", 2, {"forward": 4, "any pass": 5}, ["lgamma 1: did not communicate in forward on torch 2.13"]),
        ("2.13.0", 2, {"any pass": 7}, ["lgamma 2: did not communicate in any pass on torch 2.13"]),
        ("2.15.0", 0, {"forward": 4, "any pass": 6}, ["lgamma 1: did not communicate in forward on torch 2.15"]),
        ("2.99.0", 0, {"forward": 3, "any pass": 6}, []),  # 2.15 computed these calls without
        ("2.14.0", 0, {"forward": 9}, []),
        ("2.12.0", 0, {"forward": 9}, []),
    ],
)
def test_more_communication_than_on_any_measured_release_is_told(
    monkeypatch: pytest.MonkeyPatch, version: str, refused: int, passes: dict[str, int], expected: list[str]
) -> None:
    kept = CallCounts(versions=[], counts={}).put("2.13", {"lgamma": {"forward": 3, "any pass": 5}})
    kept = kept.put("2.15", {"lgamma": {"forward": 3, "any pass": 6}})
    monkeypatch.setattr(refusals, "read_communications", lambda: {CASE: kept})
    told = newly_communicating(CASE, {"lgamma": passes}, {"lgamma": {NO_RULE: refused}}, version)
    assert [f"{subject} {number}: {text}" for subject, number, text in told] == expected
