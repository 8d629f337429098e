"""A trainer on the simulated accelerator: its record tells of streams and memory, and one that names a device fails."""

from pathlib import Path

import pytest

from conformance.detection.case_judge import simulated_device
from conformance.outcomes import CellFailed
from conformance.plan.matrix import TRAINER_CELLS
from conformance.run.pool import Pools
from conformance.subjects.running import SubjectRuns
from tests.support.judged_trainers import store_of

MODELS = "tests.support.subjects_on_device"
DP2 = TRAINER_CELLS[0]


def runs(pools: Pools, directory: Path, name: str) -> SubjectRuns | None:
    """Return the runs of a trainer, or None where nothing can compile the device."""
    hardware = simulated_device()
    return SubjectRuns(store_of(pools, directory, f"{MODELS}:{name}", hardware=hardware)) if hardware else None


def test_a_run_tells_of_streams_and_memory(pools: Pools, tmp_path: Path) -> None:
    on_sim = runs(pools, tmp_path, "own_mesh")
    if on_sim is None:
        return
    for facts in on_sim.evidence(DP2).record.ranks:
        seen = facts.accelerator
        assert seen is not None
        assert facts.memory is not None
        assert seen.schedule == "lazy"
        assert seen.streams.unordered == []
        assert {"all_gather_copy_in_stream", "reduce_scatter_stream"} <= seen.streams.operators.keys()
        assert [held.step for held in facts.memory.held] == [-1, 0, 1, 2]
        shards = facts.memory.held[0].known_bytes["parameters"]
        assert {held.known_bytes["parameters"] for held in facts.memory.held} == {shards}
        assert facts.memory.held[-1].known_bytes["optimizer"] == shards  # momentum
        assert {(peak.step, peak.phase) for peak in facts.memory.peaks} >= {(0, "forward"), (2, "optimizer")}


def test_each_stream_can_be_starved(pools: Pools, tmp_path: Path) -> None:
    on_sim = runs(pools, tmp_path, "right")
    if on_sim is None:
        return
    first = on_sim.evidence(DP2).record
    assert first.ranks[0].accelerator is not None
    for number in first.ranks[0].accelerator.busy_streams:
        under = on_sim.under(DP2, f"starve:{number}")
        assert under.ranks[0].fingerprints == first.ranks[0].fingerprints
        assert under.ranks[0].accelerator is not None
        assert under.ranks[0].accelerator.schedule == f"starve:{number}"


def test_code_that_names_a_device_is_told_where_and_what_to_write(pools: Pools, tmp_path: Path) -> None:
    on_sim = runs(pools, tmp_path, "mesh_of_cpu")
    if on_sim is None:
        return
    with pytest.raises(CellFailed) as raised:
        on_sim.evidence(DP2)
    reason = raised.value.failure.reason
    assert "(subjects_on_device.py:" in reason
    assert reason.endswith("in place of a name such as 'cuda' or 'cpu'")
