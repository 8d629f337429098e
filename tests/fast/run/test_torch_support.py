"""Limits of older versions of torch: missing abilities, other behaviour, and tasks that must not share a process."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from conformance.experiments.build import sample_with_torch
from conformance.experiments.environment import probe
from conformance.experiments.memory import step_in_simulation, step_on_ranks
from conformance.experiments.without_fsdp import profile_without_fsdp
from conformance.instruments.collectives import reduce_op_name
from conformance.instruments.facts import UNKNOWN
from conformance.oracles import clip_schedule, schedule
from conformance.oracles.torch_versions import traits_of
from conformance.outcomes import Unsupported
from conformance.plan.cells import Cell
from conformance.run.case_runs import CaseRuns
from conformance.run.experiment import Needs
from conformance.run.pool import Task
from conformance.run.store import RecordStore
from conformance.run.torch_support import require_features
from conformance.sweeps.dtensor import redistribute
from reference_trainer.parallel_dims import resolve_mesh
from tests.support.no_pools import NoPools

TRAINS, BUILDS, PROBES, SIMULATES = Needs.TRAINING, sample_with_torch.needs, probe.needs, step_in_simulation.needs


def lacks(needs: Needs, cell: Cell, torch_version: str, *, device: str = "cpu") -> str | None:
    try:
        require_features(needs, cell, device=device, torch_version=torch_version)
    except Unsupported as lacking:
        return str(lacking)
    return None


DP2, HSDP, UNEVEN = Cell(mesh="dp2"), Cell(mesh="hsdp2x2"), Cell(mesh="dp2-tp2")
FSDP1 = Cell(mesh="dp2", implementation="fsdp1", init="full")
RESUMED = UNEVEN.but(model="uneven-tp", saved_on="tp2")
COMPILED = DP2.but(compile=True)
FUSED = UNEVEN.but(optimizer="adamw-fused", norms_in_tp=False, sequence_parallel=False, model="even")
NO_EVENT = "FSDP2 runs on the CPU from torch 2.7 on, in which torch.cpu.Stream has record_event; this is torch 2.6.0"
NO_AVERAGE = "HSDP runs on the CPU from torch 2.8 on, in which gloo averages in an all-reduce; this is torch 2.7.1"
NO_UNEVEN = (
    "FSDP2 with tensor parallelism takes uneven shards from torch 2.8 on: vocab_size is 61, which dp_shard 2 x tp 2 "
    "does not divide; this is torch 2.7.1"
)
NO_RESUME = (
    "a checkpoint of another mesh is loaded into uneven shards of tensor-parallel shards from torch 2.10 on; this is "
    "torch 2.9.1"
)
NO_CALLS = (
    "compiled blocks are observed from torch 2.10 on if they are called more than 8 times, here 12 times: before, each "
    "call compiles anew; this is torch 2.9.1"
)
NO_FUSED = "a fused optimizer steps parameters of two meshes from torch 2.9 on; this is torch 2.8.0"


@pytest.mark.parametrize(
    ("reason", "version", "refused"),
    [
        (NO_EVENT, "2.6.0", [(TRAINS, DP2), (SIMULATES, DP2)]),
        (NO_AVERAGE, "2.7.1", [(TRAINS, HSDP), (step_on_ranks.needs, HSDP), (SIMULATES, HSDP)]),
        (NO_UNEVEN, "2.7.1", [(TRAINS, UNEVEN), (BUILDS, UNEVEN)]),
        (NO_RESUME, "2.9.1", [(TRAINS, RESUMED)]),
        (NO_CALLS, "2.9.1", [(TRAINS, COMPILED.but(accumulation=2))]),
        (NO_CALLS, "2.9.1", [(TRAINS, COMPILED.but(activation_checkpointing="full"))]),
        (NO_FUSED, "2.8.0", [(TRAINS, FUSED)]),
    ],
)
def test_features_that_a_version_lacks(reason: str, version: str, refused: list[tuple[Needs, Cell]]) -> None:
    for needs, cell in refused:
        assert lacks(needs, cell, version) == reason


@pytest.mark.parametrize(
    ("version", "device", "supported"),
    [
        ("2.6.0", "cuda", [(TRAINS, DP2)]),
        ("2.6.0", "cpu", [(BUILDS, DP2), (PROBES, DP2), (profile_without_fsdp.needs, DP2), (TRAINS, FSDP1)]),
        ("2.7.1", "cuda", [(TRAINS, HSDP)]),
        ("2.7.1", "cpu", [(BUILDS, HSDP), (PROBES, UNEVEN), (TRAINS, Cell(mesh="dp4", model="uneven"))]),
        ("2.7.1+cpu", "cpu", [(TRAINS, DP2), (TRAINS, UNEVEN.but(model="even"))]),
        ("2.8.0", "cpu", [(TRAINS, HSDP), (SIMULATES, HSDP), (TRAINS, UNEVEN)]),
        ("2.8.0", "cpu", [(TRAINS, FUSED.but(optimizer="adamw-foreach")), (TRAINS, FUSED.but(norms_in_tp=True))]),
        ("2.9.1", "cpu", [(TRAINS, FUSED), (TRAINS, COMPILED), (TRAINS, RESUMED.but(model="tiny"))]),
        ("2.9.1", "cpu", [(TRAINS, RESUMED.but(saved_on="same")), (TRAINS, RESUMED.but(mesh="dp2"))]),
        ("2.10.0", "cpu", [(TRAINS, RESUMED), (TRAINS, COMPILED.but(accumulation=2))]),
    ],
)
def test_features_that_a_version_has(version: str, device: str, supported: list[tuple[Needs, Cell]]) -> None:
    for needs, cell in supported:
        assert lacks(needs, cell, version, device=device) is None
    assert lacks(BUILDS, UNEVEN, "2.7.1", device="cuda")


def test_rings_in_fp32_need_long_chunks_on_accelerators() -> None:
    ring = Cell(mesh="dp2-cp2")
    refused = lacks(TRAINS, ring, "2.13.0", device="sim")
    assert refused
    assert refused.startswith("ring attention in fp32 needs chunks of 32 tokens on accelerators, here of 4")
    for supported in (ring.but(precision="bf16-mp"), ring.but(model="large", steps=2), Cell(mesh="dp2")):
        assert lacks(TRAINS, supported, "2.13.0", device="sim") is None
    assert lacks(TRAINS, ring, "2.13.0") is None


def test_require_features_checks_the_run_that_saves_too(tmp_path: Path) -> None:
    store = RecordStore(directory=tmp_path, session="s", torch_version="2.7.1", defect=None, deadline_s=60)
    resumed = Cell(mesh="dp2", saved_on="tp2", steps=4)
    with pytest.raises(Unsupported, match=r"vocab_size is 61, which dp_shard 1 x tp 2 does not divide"):
        CaseRuns(store).run(resumed)


class Kinds(NoPools):
    """Pools that note the kinds of tasks, of which only equal ones may share ranks."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def run(self, task: Task, *, world_size: int, **_options: Any) -> list[Any]:
        self.seen.append(task.kind)
        return [{"tried": 1}] * world_size


@pytest.mark.parametrize(("torch_version", "pools"), [("2.10.0", 3), ("2.13.0+cpu", 1)])
def test_tasks_that_dtensor_confuses_do_not_share_ranks(torch_version: str, pools: int, tmp_path: Path) -> None:
    kinds = Kinds()
    store = RecordStore(
        directory=tmp_path, session="s", torch_version=torch_version, defect=None, deadline_s=60, pools=kinds
    )
    cells = [Cell(mesh="dp2-tp2"), Cell(mesh="dp2-tp2", model="even"), Cell(mesh="dp2-tp2", precision="bf16-init")]
    for cell in [*cells, Cell(mesh="dp2-tp2", precision="bf16-mp")]:
        CaseRuns(store).measure(redistribute, cell)
    assert len(set(kinds.seen)) == pools


def test_one_rank_gathers_up_to_2_8_and_reduces_up_to_2_9(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Cell(mesh="tp2", reshard="always").config
    dims = resolve_mesh(config.mesh, world_size=2)
    gathers, reduces = {"all_gather": 8}, {"reduce_scatter": 4}
    for version, expected in (("2.8.0", gathers | reduces), ("2.9.1", reduces), ("2.10.0", {})):
        monkeypatch.setattr(schedule, "traits_of", lambda _installed, version=version: traits_of(version))
        events = schedule.fsdp_events(config, dims, dict.fromkeys(schedule.entered(schedule.groups(config)), 8))
        assert all((event.group, event.numel) == ("dp_shard", 8) for event in events)
        assert Counter(event.kind for event in events) == expected


def test_norms_are_reduced_together_up_to_2_9(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Cell(mesh="dp2-tp2").config
    for version, numels in (("2.9.1", [1, 1]), ("2.10.0", [3, 3])):
        monkeypatch.setattr(clip_schedule, "traits_of", lambda _installed, version=version: traits_of(version))
        events = clip_schedule.clip_events(["a", "b", "c"], config, resolve_mesh(config.mesh, world_size=4))
        assert [event.numel for event in events] == numels


def test_a_reduction_that_does_not_tell_its_operation() -> None:
    assert reduce_op_name({"reduce_op": object()}) == UNKNOWN
    assert reduce_op_name({"reduce_op": "sum"}) == "SUM"
    assert reduce_op_name({}) is None
