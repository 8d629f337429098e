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

TRAINS, BUILDS, PROBES, SIMULATES = Needs.TRAINING, sample_with_torch.needs, probe.needs, step_in_simulation.needs


def lacks(needs: Needs, cell: Cell, torch_version: str, *, device: str = "cpu") -> str | None:
    try:
        require_features(needs, cell, device=device, torch_version=torch_version)
    except Unsupported as lacking:
        return str(lacking)
    return None


def test_fsdp2_on_the_cpu_needs_the_event_of_a_stream() -> None:
    cell = Cell(mesh="dp2")
    reason = "FSDP2 runs on the CPU from torch 2.7 on, in which torch.cpu.Stream has record_event; this is torch 2.6.0"
    assert lacks(TRAINS, cell, "2.6.0") == reason
    assert lacks(SIMULATES, cell, "2.6.0") == reason
    for needs, version, device in (
        (TRAINS, "2.6.0", "cuda"),
        (TRAINS, "2.7.1+cpu", "cpu"),
        (BUILDS, "2.6.0", "cpu"),
        (PROBES, "2.6.0", "cpu"),
        (profile_without_fsdp.needs, "2.6.0", "cpu"),
    ):
        assert lacks(needs, cell, version, device=device) is None
    assert lacks(TRAINS, Cell(mesh="dp2", implementation="fsdp1", init="full"), "2.6.0") is None


def test_hsdp_on_the_cpu_needs_an_averaging_all_reduce() -> None:
    cell = Cell(mesh="hsdp2x2")
    reason = "HSDP runs on the CPU from torch 2.8 on, in which gloo averages in an all-reduce; this is torch 2.7.1"
    assert lacks(TRAINS, cell, "2.7.1") == reason
    assert lacks(step_on_ranks.needs, cell, "2.7.1") == reason
    assert lacks(SIMULATES, cell, "2.7.1") == reason
    for needs, version, device in (
        (TRAINS, "2.7.1", "cuda"),
        (TRAINS, "2.8.0", "cpu"),
        (BUILDS, "2.7.1", "cpu"),
        (SIMULATES, "2.8.0", "cpu"),
    ):
        assert lacks(needs, cell, version, device=device) is None


def test_fsdp2_with_tensor_parallelism_needs_even_shards_up_to_2_7() -> None:
    uneven, even = Cell(mesh="dp2-tp2"), Cell(mesh="dp2-tp2", model="even")
    assert lacks(TRAINS, uneven, "2.7.1") == (
        "FSDP2 with tensor parallelism takes uneven shards from torch 2.8 on: vocab_size is 61, which dp_shard 2 x "
        "tp 2 does not divide; this is torch 2.7.1"
    )
    assert lacks(BUILDS, uneven, "2.7.1", device="cuda")
    for cell, version in ((uneven, "2.8.0"), (even, "2.7.1"), (Cell(mesh="dp4", model="uneven"), "2.7.1")):
        assert lacks(TRAINS, cell, version) is None
    assert lacks(PROBES, uneven, "2.7.1") is None


def test_fsdp2_loads_uneven_shards_of_another_mesh_from_2_10_on() -> None:
    resumed = Cell(mesh="dp2-tp2", model="uneven-tp", saved_on="tp2")
    assert lacks(TRAINS, resumed, "2.9.1") == (
        "a checkpoint of another mesh is loaded into uneven shards of tensor-parallel shards from torch 2.10 on; this "
        "is torch 2.9.1"
    )
    assert lacks(TRAINS, resumed, "2.10.0") is None
    for other in ({"model": "tiny"}, {"saved_on": "same"}, {"mesh": "dp2"}):
        assert lacks(TRAINS, resumed.but(**other), "2.9.1") is None


def test_compiled_blocks_are_observed_for_some_calls_up_to_2_9() -> None:
    compiled = Cell(mesh="dp2", compile=True)
    for cell, calls in ((compiled.but(accumulation=2), 12), (compiled.but(activation_checkpointing="full"), 12)):
        assert lacks(TRAINS, cell, "2.9.1") == (
            "compiled blocks are observed from torch 2.10 on if they are called more than 8 times, here "
            f"{calls} times: before, each call compiles anew; this is torch 2.9.1"
        )
        assert lacks(TRAINS, cell, "2.10.0") is None
    assert lacks(TRAINS, compiled, "2.9.1") is None


def test_a_fused_optimizer_steps_on_two_meshes_from_2_9_on() -> None:
    fused = Cell(mesh="dp2-tp2", optimizer="adamw-fused", norms_in_tp=False, sequence_parallel=False, model="even")
    assert lacks(TRAINS, fused, "2.8.0") == (
        "a fused optimizer steps parameters of two meshes from torch 2.9 on; this is torch 2.8.0"
    )
    assert lacks(TRAINS, fused, "2.9.1") is None
    for other in ({"optimizer": "adamw-foreach"}, {"norms_in_tp": True}):
        assert lacks(TRAINS, fused.but(**other), "2.8.0") is None


def test_require_features_checks_the_run_that_saves_too(tmp_path: Path) -> None:
    store = RecordStore(directory=tmp_path, session="s", torch_version="2.7.1", defect=None, deadline_s=60)
    resumed = Cell(mesh="dp2", saved_on="tp2", steps=4)
    with pytest.raises(Unsupported, match=r"vocab_size is 61, which dp_shard 1 x tp 2 does not divide"):
        CaseRuns(store).run(resumed)


class Kinds:
    """Substitute for `Pools` that notes the kinds of tasks, of which only equal ones may share ranks."""

    waited_s = 0.0
    trained_s = 0.0
    max_world_size = 8

    def __init__(self) -> None:
        self.seen: list[str] = []

    def prepare(self) -> None: ...

    def close(self) -> None: ...

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


def pretend_version(module: Any, torch_version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "traits_of", lambda _installed: traits_of(torch_version))


@pytest.mark.parametrize(
    ("torch_version", "expected"),
    [("2.8.0", {"all_gather": 8, "reduce_scatter": 4}), ("2.9.1", {"reduce_scatter": 4}), ("2.10.0", {})],
)
def test_one_rank_gathers_up_to_2_8_and_reduces_up_to_2_9(
    torch_version: str, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_version(schedule, torch_version, monkeypatch)
    config = Cell(mesh="tp2", reshard="always").config
    dims = resolve_mesh(config.mesh, world_size=2)
    events = schedule.fsdp_events(config, dims, dict.fromkeys(schedule.entered(schedule.groups(config)), 8))
    assert all((event.group, event.numel) == ("dp_shard", 8) for event in events)
    assert Counter(event.kind for event in events) == expected


@pytest.mark.parametrize(("torch_version", "numels"), [("2.9.1", [1, 1]), ("2.10.0", [3, 3])])
def test_norms_are_reduced_together_up_to_2_9(
    torch_version: str, numels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_version(clip_schedule, torch_version, monkeypatch)
    config = Cell(mesh="dp2-tp2").config
    events = clip_schedule.clip_events(["a", "b", "c"], config, resolve_mesh(config.mesh, world_size=4))
    assert [event.numel for event in events] == numels


def test_a_reduction_that_does_not_tell_its_operation() -> None:
    assert reduce_op_name({"reduce_op": object()}) == UNKNOWN
    assert reduce_op_name({"reduce_op": "sum"}) == "SUM"
    assert reduce_op_name({}) is None
