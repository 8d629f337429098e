"""Faults that are no wrong tensor, located: a defect of each family, and its benign twin."""

from pathlib import Path

import pytest

from conformance.detection.case_judge import CaseJudge
from conformance.judge.measurements import Measurement
from conformance.judge.support import Machine
from conformance.localisation.localise import explained
from conformance.report.location import Location
from conformance.run.pool import Pools


def located(directory: Path, pools: Pools, law: str, cell: str, defect: str | None) -> Location | None:
    judge = CaseJudge(directory, pools)
    (case,) = judge.cases_of(f"id = {cell}", [law])
    store = judge.store(defect=defect)
    machine = Machine(hardware=store.hardware, torch_version=store.torch_version, max_world_size=pools.max_world_size)
    return explained(case, store, machine=machine, measured=dict[str, Measurement]())


@pytest.mark.parametrize(
    ("law", "cell", "defect", "place"),
    [
        ("RS-1", "dp2-fp32-default-meta", "one-layer-not-resharded", ("schedule", "layers.1")),
        ("MEM-6", "dp2-fp32-default-meta-even-sgd", "rare-memory-leak", ("memory", "")),
        (
            "RS-1",
            "dp2-ep2-fp32-default-meta-experts",
            "experts-not-resharded",
            ("schedule", "layers.0.feed_forward.experts"),
        ),
        ("MP-1", "dp2-bf16mp-default-meta", "reduce-dtype-dropped", ("schedule", "output")),
    ],
)
def test_a_fault_is_located_and_its_benign_twin_is_not(
    tmp_path: Path, pools: Pools, law: str, cell: str, defect: str, place: tuple[str, str]
) -> None:
    location = located(tmp_path, pools, law, cell, defect)
    assert location is not None
    assert (location.family, location.name) == place
    assert located(tmp_path, pools, law, cell, None) is None
