"""Waivers: their cases, the verdicts that they change, and mistakes in waivers.yaml."""

import datetime
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.detection.case_judge import the_matrix
from conformance.judge.measurements import Measurement
from conformance.judge.verdicts import Verdict
from conformance.judge.waivers import Symptom, Waiver, expired_warning, load_waivers, profile_waivers, waiver_of
from conformance.plan.cells import Cell
from conformance.plan.matrix import Case, Matrix
from conformance.project import PROJECT

WAIVER = Waiver(
    law="INIT-8",
    cells="world > 1",
    device="cpu",
    torch="2.6 - 2.13",
    issue="https://github.com/pytorch/pytorch/issues/1",
    reason="it is so",
    expires="2027-01-31",
    shows=[Symptom(metric="norm of rank *", least=1.0, most=2.0)],
)
CELL, DAY = Cell(mesh="dp2"), datetime.date(2027, 1, 31)


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return the_matrix()


def test_matches_law_cells_device_and_versions() -> None:
    def match(law: str = "INIT-8", cell: Cell = CELL, device: str = "cpu", minor: int = 13) -> Waiver | None:
        return waiver_of([WAIVER], Case(law, cell), device=device, torch=(2, minor))

    assert match() == match(minor=6) == WAIVER
    for other in (match(law="INIT-7"), match(cell=Cell(mesh="dp1")), match(device="cuda"), match(minor=5)):
        assert other is None
    assert match(minor=14) is None


def metric(value: float | None) -> Measurement:
    """A number that must be 0."""
    return Measurement(kind="exact", value=value, lower=0, upper=0, unit="")


def test_a_waiver_of_a_trainer_is_of_no_other() -> None:
    waiver = msgspec.structs.replace(WAIVER, law="gradients", trainer="fabric")
    cases = [Case("gradients", CELL, trainer) for trainer in ("fabric", "accelerate", None)]
    assert [waiver.matches(case, device="cpu", torch=(2, 13)) for case in cases] == [True, False, False]


def test_a_failure_is_waived_a_pass_is_reported_and_nothing_else_changes() -> None:
    waived = WAIVER.judge(Verdict.FAIL, "measured 2", {"norm of rank 1": metric(2.0)})
    assert waived == (Verdict.WAIVED, "https://github.com/pytorch/pytorch/issues/1: it is so; measured 2")
    assert WAIVER.judge(Verdict.PASS, "", {})[0] == Verdict.UNEXPECTED_PASS
    for verdict in (Verdict.TIMEOUT, Verdict.CRASH, Verdict.ERROR, Verdict.UNSUPPORTED):
        assert WAIVER.judge(verdict, "why", {}) == (verdict, "why")


@pytest.mark.parametrize(
    ("measured", "other"),
    [
        ({"norm of rank 1": metric(2.0)}, ""),
        ({"norm of rank 0": metric(1.0), "norm of rank 3": metric(2.0), "loss": metric(0.0)}, ""),
        ({"norm of rank 1": metric(2.1)}, "norm of rank 1 is 2.1"),
        ({"norm of rank 1": metric(0.5)}, "norm of rank 1 is 0.5"),
        ({"norm of rank 1": metric(None)}, "norm of rank 1 is None"),
        ({"norm of rank 1": metric(2.0), "loss": metric(2.0)}, "loss is 2.0"),
        ({"norm of rank 1": metric(0.0)}, "no metric is out of its bounds"),
        ({}, "no metric is out of its bounds"),
    ],
)
def test_a_waiver_covers_its_symptoms_and_nothing_else(measured: dict[str, Measurement], other: str) -> None:
    verdict, reason = WAIVER.judge(Verdict.FAIL, "broken", measured)
    assert verdict == (Verdict.FAIL if other else Verdict.WAIVED)
    assert not other or reason == f"broken; {other}, which the waiver of {WAIVER.issue} does not cover"


def test_a_symptom_may_be_one_of_some_releases() -> None:
    symptom = msgspec.structs.replace(WAIVER.shows[0], torch="2.6 - 2.12")
    waivers = [msgspec.structs.replace(WAIVER, shows=[symptom])]
    verdicts = []
    for torch in ((2, 12), (2, 13)):
        waiver = waiver_of(waivers, Case("INIT-8", CELL), device="cpu", torch=torch)
        assert waiver
        verdicts.append(waiver.judge(Verdict.FAIL, "", {"norm of rank 1": metric(2.0)})[0])
    assert verdicts == [Verdict.WAIVED, Verdict.FAIL]


def test_a_symptom_may_be_one_of_some_cells() -> None:
    symptom = msgspec.structs.replace(WAIVER.shows[0], cells="mesh = dp4")
    waivers = [msgspec.structs.replace(WAIVER, shows=[symptom])]
    cases = [Case("INIT-8", cell) for cell in (CELL, Cell(mesh="dp4"))]
    shown = [waiver_of(waivers, case, device="cpu", torch=(2, 13)) for case in cases]
    assert [waiver and len(waiver.shows) for waiver in shown] == [0, 1]


def written(path: Path, *changes: Mapping[str, object]) -> Path:
    """Write a file with a waiver for each set of changes."""
    waivers = [{**msgspec.to_builtins(WAIVER), **change} for change in changes]
    file = path / "waivers.yaml"
    file.write_bytes(msgspec.json.encode({"schema": 1, "waivers": waivers}))
    return file


def test_the_shipped_file_is_read(matrix: Matrix) -> None:
    assert load_waivers(PROJECT / "waivers.yaml", matrix)


def test_an_expired_waiver_waives_nothing_and_is_told(tmp_path: Path, matrix: Matrix) -> None:
    """All installed copies of the suite go on working on the day after a waiver has expired."""
    file, profile = written(tmp_path, {}, {"law": "INIT-7", "expires": "2027-02-28"}), matrix.profile("pr")
    in_force, expired = profile_waivers(file, matrix, profile, today=DAY)
    assert ([waiver.law for waiver in in_force], expired) == (["INIT-8", "INIT-7"], [])
    in_force, expired = profile_waivers(file, matrix, profile, today=DAY + datetime.timedelta(days=1))
    assert ([waiver.law for waiver in in_force], expired) == (["INIT-7"], [WAIVER])
    warning = expired_warning(expired)
    assert warning.startswith(f"expired waivers waive nothing: INIT-8 ({WAIVER.issue}, until 2027-01-31); ")
    assert "\n" not in warning
    assert expired_warning([]) == ""
    without = msgspec.structs.replace(profile, allows=())
    assert profile_waivers(file, matrix, without, today=DAY) == ([], [])


def test_two_waivers_of_a_case_are_a_mistake(tmp_path: Path, matrix: Matrix) -> None:
    with pytest.raises(ValueError, match="two waivers of INIT-8 apply to the same case"):
        load_waivers(written(tmp_path, {}, {"cells": "mesh = dp4"}), matrix)
    for field, value in (("torch", "2.14 - 2.15"), ("cells", "world = 1"), ("device", "cuda"), ("law", "INIT-7")):
        load_waivers(written(tmp_path, {}, {field: value}), matrix)


VERSIONS = st.tuples(st.integers(6, 20), st.integers(6, 20)).map(lambda two: f"2.{min(two)} - 2.{max(two)}")
SELECTIONS = st.sampled_from(["world > 1", "mesh = dp2", "mesh in (dp4, tp2)", "tp = 1", "seed = 1"])
MESHES = st.sampled_from(["dp1", "dp2", "dp4", "tp2", "dp2-tp2"])


@given(one=st.tuples(SELECTIONS, VERSIONS), two=st.tuples(SELECTIONS, VERSIONS), meshes=st.sets(MESHES, min_size=1))
def test_waivers_overlap_if_some_case_has_both(one: tuple[str, str], two: tuple[str, str], meshes: set[str]) -> None:
    first, second = (msgspec.structs.replace(WAIVER, cells=cells, torch=torch) for cells, torch in (one, two))
    cells = [Cell(mesh=mesh) for mesh in meshes]

    def both_apply(cell: Cell, version: tuple[int, ...]) -> bool:
        return all(waiver.matches(Case("INIT-8", cell), device="cpu", torch=version) for waiver in (first, second))

    expected = any(both_apply(cell, (2, minor)) for cell in cells for minor in range(6, 21))
    assert first.overlaps(second, cells) == second.overlaps(first, cells) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cells": "mesh = dp4096"}, "the waiver of INIT-8 applies to no case of the matrix"),
        ({"trainer": "fabric"}, "INIT-8: laws of any trainer need `trainer`, and no other law has one"),
        ({"law": "gradients"}, "gradients: laws of any trainer need `trainer`, and no other law has one"),
        ({"expires": "2027-02-30"}, "day is out of range|must be in range"),
        ({"expires": "soon"}, "expires"),
        ({"device": "tpu"}, "device"),
        ({"shows": [{"metric": "loss", "least": 2, "most": 1}]}, "from 2.0 to 1.0: exchange `least` and `most`"),
        ({"shows": [{"metric": "loss", "least": 2}]}, "most"),
        ({"shows": [{"metric": "loss", "least": 1, "most": 1, "torch": "2.6"}]}, "torch"),
        (
            {"shows": [{"metric": "loss", "least": 1, "most": 1, "torch": "2.5 - 2.6"}]},
            "name releases of the waiver, 2.6 - ",
        ),
        ({"shows": [{"metric": "loss", "least": 1, "most": 1, "torch": "2.9 - 2.8"}]}, "the first one first"),
        ({"shows": [{"metric": "loss", "least": 1, "most": 1, "cells": "mesh = dp1"}]}, "loss is of no case of the "),
    ],
)
def test_mistakes_are_named(tmp_path: Path, matrix: Matrix, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_waivers(written(tmp_path, changes), matrix)
