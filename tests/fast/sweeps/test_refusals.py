"""Refused calls of sweeps: kept by release, and no more allowed than before."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from conformance.cli.refusals import refused_calls
from conformance.sweeps import refusals
from conformance.sweeps.refusals import Refusals, excess, refused_on

CASE = "DT-3/dp2"
NO_RULE = "NotImplementedError: no rule"


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> Refusals:
    """Measure that 2.13 refuses `lgamma` twice and `prod` never, 2.14 refuses both, and 2.15 refuses `prod` alone."""
    kept = Refusals(versions=[], errors={})
    kept = kept.put("2.15", {"prod": {NO_RULE: 1}})
    kept = kept.put("2.13", {"lgamma": {NO_RULE: 2}})
    kept = kept.put("2.14", {"lgamma": {NO_RULE: 2}, "prod": {NO_RULE: 1}})
    monkeypatch.setattr(refusals, "read_refusals", lambda: {CASE: kept})
    return kept


def test_releases_are_read_back_and_kept_as_changes(measured: Refusals) -> None:
    assert measured.versions == ["2.13", "2.14", "2.15"]
    assert measured.errors == {
        "lgamma": {"2.13": {NO_RULE: 2}, "2.15": {}},
        "prod": {"2.14": {NO_RULE: 1}},
    }
    assert measured.errors_on("lgamma", "2.14") == {NO_RULE: 2}
    assert measured.errors_on("lgamma", "2.15") == {}


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
    told = [f"{subject} {number}: {text}" for subject, number, text in excess(CASE, refused, version)]
    assert [text for text in told if not text.startswith(expected)] == []
    assert len(told) == bool(expected)


def test_a_case_that_was_not_measured_has_no_bound() -> None:
    assert not [*excess("DT-3/dp3", {"prod": {NO_RULE: 1}}, "2.13.0")]


@pytest.mark.parametrize(("defaults", "told"), [("Rprop(no option)", 0), ("RMSprop(no option)", 1)])
def test_an_option_was_not_tried_where_the_defaults_were_refused(
    monkeypatch: pytest.MonkeyPatch, defaults: str, told: int
) -> None:
    option = {"Rprop(capturable=True)": {NO_RULE: 1}}
    kept = Refusals(versions=[], errors={}).put("2.13", {defaults: {NO_RULE: 1}}).put("2.15", option)
    monkeypatch.setattr(refusals, "read_refusals", lambda: {CASE: kept})
    assert len([*excess(CASE, option, "2.15.0")]) == told


def test_errors_are_read_from_the_metrics_of_bounded_cases() -> None:
    bounded = {"calls of all subjects": 3, f"calls of prod: refused: {NO_RULE}": 2, "prod: refused": 3, "mm: wrong": 0}
    cases = [(CASE, bounded), ("DT-3/dp3", {"calls of all subjects": 0}), ("DT-2/dp2", {"mm: refused": 1})]
    report = SimpleNamespace(
        cases=[
            SimpleNamespace(id=case, measured={name: SimpleNamespace(value=float(n)) for name, n in metrics.items()})
            for case, metrics in cases
        ]
    )
    assert refused_calls(cast("Any", report)) == {CASE: {"prod": {NO_RULE: 2}}, "DT-3/dp3": {}}


def test_a_tried_release_that_was_not_measured_has_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Refusals(versions=[], errors={}).put("2.13", {})
    monkeypatch.setattr(refusals, "read_refusals", lambda: {CASE: kept})
    found = {version: [*excess(CASE, {"prod": {NO_RULE: 1}}, version)] for version in ("2.13.0", "2.14.1", "2.99.0")}
    assert [bool(each) for each in found.values()] == [True, False, True]


@pytest.mark.parametrize(
    ("version", "subjects"), [("2.12.0", set()), ("2.14.1", {"lgamma", "prod"}), ("2.15", {"prod"})]
)
def test_known_refusals_are_those_of_the_last_measured_release(version: str, subjects: set[str]) -> None:
    assert refused_on(version) == subjects
