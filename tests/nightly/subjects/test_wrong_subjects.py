"""Wrong functions, each with a law that it must fail; and a right one, which passes all laws."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from conformance.judge.verdicts import Verdict
from conformance.laws.trainers.test_any_trainer import test_shards_partition_parameters as shards_partition_parameters
from conformance.outcomes import ConformanceFailure
from conformance.plan.matrix import FAST_CELLS, TRAINER_CELLS
from conformance.run.pool import Pools
from conformance.subjects.evidence import Evidence, Reference, SubjectRecord
from conformance.subjects.running import SubjectRuns
from tests.support.judged_trainers import BY_ID, DP2, HSDP, LAWS, TP, judged_trainer

TRAFFIC = "tests.support.subjects_with_traffic"


FAULTS = (
    "gradients-summed",
    "local-norm",
    "parameter-skipped",
    "stale-shard",
    "parameters-frozen",
    "layer-not-synchronised",
)
MEMORY_FAULTS = ("full-weights-kept", "gradients-left", "forward-kept")
"""Faults that laws of memory see, which hold in bf16, too."""
ALL_FAULTS = (*FAULTS, *MEMORY_FAULTS)


def test_a_right_function_passes_and_every_fault_is_seen(pools: Pools, tmp_path: Path) -> None:
    trainer = judged_trainer(pools, tmp_path, "right", *TRAINER_CELLS)
    assert trainer.is_conformant(), trainer.reasons()
    unsupported = {entry.case.cell for entry in trainer.judged if entry.verdict == Verdict.UNSUPPORTED}
    assert unsupported == {cell for cell in TRAINER_CELLS if cell.mesh == "dp2-tp2"}
    others = [cell for cell in TRAINER_CELLS if cell.mesh != TP.mesh]
    on_sharing_ranks = {law for law, each in LAWS.items() if not any(map(each.law.scope.holds, others))}
    passed = {entry.case.law for entry in trainer.judged if entry.verdict == Verdict.PASS}
    assert passed == LAWS.keys() - on_sharing_ranks
    faults = trainer.faults()
    assert [(seen.cell, seen.fault) for seen in faults] == [(c.id, fault) for c in (DP2, HSDP) for fault in ALL_FAULTS]
    assert all(seen.laws for seen in faults), faults


@pytest.mark.parametrize("options", ["full-tied", "meta", "meta-tied", "full-acc2-uneven", "full-from.same"])
def test_faults_are_seen_on_the_first_cell_that_can_show_them(pools: Pools, tmp_path: Path, options: str) -> None:
    """No other cell has been run."""
    cell = BY_ID[f"dp2-fp32-default-{options}"]
    faults = judged_trainer(pools, tmp_path, "right", BY_ID["dp2-bf16mp-default-full"], cell).faults()
    assert [seen.fault for seen in faults] == [*ALL_FAULTS]
    assert {seen.cell for seen in faults if seen.fault in FAULTS} == {cell.id}
    assert all(seen.laws for seen in faults), faults


def test_the_reference_trainer_conforms_by_the_laws_of_any_trainer(pools: Pools, tmp_path: Path) -> None:
    trainer = judged_trainer(pools, tmp_path, "conformance.subjects.shipped.reference:ReferenceTrainer", *TRAINER_CELLS)
    assert {entry.verdict for entry in trainer.judged} == {Verdict.PASS}, trainer.reasons()
    faults = trainer.faults()
    assert faults
    assert all(seen.laws for seen in faults), faults


def test_faults_are_seen_by_a_function_in_bf16_alone(pools: Pools, tmp_path: Path) -> None:
    cell = BY_ID["dp2-bf16mp-default-full"]
    trainer = judged_trainer(pools, tmp_path, "only_in_bf16", cell)
    assert trainer.is_conformant(), trainer.reasons()
    faults = trainer.faults()
    assert [(seen.cell, seen.fault) for seen in faults] == [(cell.id, fault) for fault in ALL_FAULTS]
    assert all(seen.laws for seen in faults), faults


SEEN_BY = [
    ("plain_ddp", DP2.id, {"fsdp-is-on"}),
    ("gradients_not_divided", DP2.id, {"gradients"}),
    ("local_clip", DP2.id, {"gradient-norm", "parameters", "loss", "clipping-reduces-norms"}),
    ("no_clip", DP2.id, {"clipping"}),
    ("buffer_not_initialised", "dp2-fp32-default-meta", {"initialised"}),
    ("forgotten", "dp2-fp32-default-meta", {"initialised"}),
    ("late_and_uninitialised", "dp2-fp32-default-meta", {"initialised"}),
    ("optimizer_first", DP2.id, {"optimizer-holds-each-once", "every-update"}),
    ("precision_forgotten", "dp2-bf16mp-default-full", {"bf16-is-used"}),
    ("layer_without_policy", "dp2-bf16mp-default-full", {"bf16-is-used"}),
    ("layer_without_policy_beside_a_router", "dp2-bf16mp-default-full", {"bf16-is-used"}),
    ("optimizer_skips_a_rank", "dp2-bf16mp-default-full", {"bf16-parameters"}),
    (f"{TRAFFIC}:gathered_one_by_one", TP.id, {"no-needless-collectives"}),
    (f"{TRAFFIC}:no_such_module", TP.id, {"tensor-parallelism-is-on"}),
    ("masters_in_bf16", "dp2-bf16mp-default-full", {"fp32-masters"}),
    ("other_weights_on_each_rank", DP2.id, {"initial-weights"}),
    ("not_replicated", HSDP.id, {"replicas"}),
    ("frozen_layer", DP2.id, {"optimizer-holds-each-once", "every-update"}),
    ("without_gradient", DP2.id, {"every-gradient"}),
    ("not_divided_in_bf16", "dp2-bf16mp-default-full", {"bf16-gradients"}),
    ("untied", "dp2-fp32-default-full-tied", {"tied-weights", "gradients"}),
    ("optimizer_not_loaded", "dp2-fp32-default-full-from.same", {"parameters"}),
    ("nothing_loaded", "dp2-fp32-default-full-from.same", {"parameters"}),
    ("layer_gathered_twice", DP2.id, {"parameters-are-gathered"}),
    ("layer_not_reduced_over_replicas", HSDP.id, {"gradients-are-reduced"}),
    ("layer_not_synchronised", DP2.id, {"every-gradient"}),
    ("layer_not_synchronised", "dp2-fp32-default-full-acc2", {"every-gradient", "gradients-are-reduced"}),
    ("nothing_synchronised", "dp2-fp32-default-full-acc2", {"every-gradient"}),
    ("nothing_reduced_over_replicas", HSDP.id, {"gradients-are-reduced"}),
    ("reduced_in_bf16", DP2.id, {"wire-dtypes"}),
    ("ranks_reduce_differently", DP2.id, {"same-collectives"}),
    ("gradients_gathered_to_clip", DP2.id, {"clipping-reduces-norms"}),
    ("kept_after_backward", DP2.id, {"resharded"}),
]
"""Wrong trainer, cell, and the laws that see the fault."""


def test_every_law_of_any_trainer_can_fail() -> None:
    memory = {law for law in LAWS if law.startswith("memory-")}  # see the modules about memory and the device
    assert {law for *_, laws in SEEN_BY for law in laws} | {"partition"} | memory == LAWS.keys()


@pytest.mark.parametrize(("name", "cell", "laws"), SEEN_BY)
def test_a_wrong_function_fails_by_the_laws_that_see_it(
    pools: Pools, tmp_path: Path, name: str, cell: str, laws: set[str]
) -> None:
    trainer = judged_trainer(pools, tmp_path, name, BY_ID[cell])
    assert laws <= trainer.failing(), trainer.reasons()


@pytest.mark.parametrize("name", dict.fromkeys(name for name, *_ in SEEN_BY))
def test_a_wrong_function_fails_in_a_fast_session(pools: Pools, tmp_path: Path, name: str) -> None:
    laws = {law for wrong, _, seen_by in SEEN_BY if wrong == name for law in seen_by}
    trainer = judged_trainer(pools, tmp_path, name, *FAST_CELLS)
    assert laws & trainer.failing(), trainer.reasons()


@pytest.mark.parametrize(
    ("name", "cell", "problem"),
    [
        ("not_resumable", "dp2-fp32-default-full-from.same", "the run was made without functions that save and load"),
        ("without_save", "dp2-fp32-default-full-from.same", "the run has no methods save and load: let unsupported()"),
        ("late_and_silent", DP2.id, "train() did not call observer.built()"),
        ("without_phases", DP2.id, "call observer.phase('backward', step=...)"),
        ("raises", DP2.id, "rank 1 raised RuntimeError: no such layer (subject_models.py:"),
        ("returns_a_number", DP2.id, "parallelize returned a int: return the model, nothing, or"),
    ],
)
def test_a_mistake_is_one_crash_of_a_cell_with_one_line(
    pools: Pools, tmp_path: Path, name: str, cell: str, problem: str
) -> None:
    trainer = judged_trainer(pools, tmp_path, name, BY_ID[cell])
    (first, *others) = trainer.judged
    assert first.verdict == Verdict.CRASH
    assert problem in first.reason
    assert {(entry.verdict, entry.reason) for entry in others} == {
        (Verdict.UNSUPPORTED, f"did not run: {first.reason}")
    }


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("late", [DP2.id]),
        ("meant", [DP2.id, "dp2-fp32-default-meta"]),
        ("sum_declared", [DP2.id]),
        ("layer_that_computes_twice", [DP2.id, "dp2-fp32-default-full-acc2"]),
        ("unused_layer_in_a_group_of_its_own", [DP2.id]),
        ("own_mesh_names", [DP2.id]),
        ("switched_off_and_on", ["dp2-fp32-default-full-acc2"]),
        ("reduced_by_the_loss", ["dp2-fp32-default-full-acc2"]),
        ("layer_kept_in_fp32", ["dp2-bf16mp-default-full"]),
        ("router_in_fp32", ["dp2-bf16mp-default-full"]),
        ("ignored_router", ["dp2-bf16mp-default-full"]),
        ("inputs_cast_by_groups", ["dp2-bf16mp-default-full"]),
        ("recurrence_in_fp32", ["dp2-bf16mp-default-full"]),
    ],
)
def test_unusual_and_right_trainers_are_conformant(pools: Pools, tmp_path: Path, name: str, cells: list[str]) -> None:
    trainer = judged_trainer(pools, tmp_path, name, *(BY_ID[cell] for cell in cells))
    assert trainer.is_conformant(), trainer.reasons()


def test_a_parameter_that_is_not_partitioned_fails() -> None:
    facts = SimpleNamespace(layouts={"weight": "digest"})
    record = SimpleNamespace(ranks=[facts], is_partitioned=lambda name: False, select=lambda prefix: {})
    evidence = Evidence(cast("SubjectRecord", record), cast("Reference", None))
    with pytest.raises(ConformanceFailure, match="parameters not partitioned: measured 1, expected 0"):
        shards_partition_parameters(evidence)


def test_ddp_fails_by_nothing_but_being_no_fsdp(pools: Pools, tmp_path: Path) -> None:
    assert judged_trainer(pools, tmp_path, "plain_ddp").failing() == {"fsdp-is-on"}


def test_a_model_that_cannot_compute_in_fp64_is_compared_in_fp32(pools: Pools, tmp_path: Path) -> None:
    trainer = judged_trainer(pools, tmp_path, "without_fp64")
    assert trainer.is_conformant(), trainer.reasons()
    assert SubjectRuns(trainer.store).reference(DP2).facts.dtype == "fp32"


def test_an_adapter_that_shows_another_optimizer_is_blind(pools: Pools, tmp_path: Path) -> None:
    faults = judged_trainer(pools, tmp_path, "hidden_optimizer").faults()
    assert [seen.fault for seen in faults if seen.is_unseen] == [*FAULTS[1:-1]]


def test_after_a_cell_that_hangs_no_other_is_run(pools: Pools, tmp_path: Path) -> None:
    """The cells before it are judged, and whether faults are seen on them; each of the rest would cost its limit."""
    start_s = time.monotonic()
    hanging = BY_ID["dp2-bf16mp-default-full"]
    trainer = judged_trainer(pools, tmp_path, "hangs", DP2, hanging, HSDP, TP, limit_s=10.0)
    assert trainer.verdicts(hanging) == {Verdict.TIMEOUT, Verdict.UNSUPPORTED}
    assert trainer.verdicts(HSDP) == {Verdict.UNSUPPORTED}
    assert trainer.verdicts(TP) == {Verdict.UNSUPPORTED}
    assert f"not run: cell {hanging.id} hung" in trainer.reasons()
    faults = trainer.faults()
    assert {seen.cell for seen in faults} == {DP2.id}
    assert all(seen.laws for seen in faults)
    assert time.monotonic() - start_s < 40


def test_after_a_fault_that_hangs_no_other_is_tried(pools: Pools, tmp_path: Path) -> None:
    faults = judged_trainer(pools, tmp_path, "hangs_with_a_fault", limit_s=5.0).faults()
    assert [(seen.fault, seen.laws) for seen in faults] == [("gradients-summed", [])]
    assert faults[0].raised.startswith("no result from ranks 0, 1 within")
    assert not faults[0].is_unseen


def test_a_fault_of_which_all_laws_fail_already_is_not_blind(pools: Pools, tmp_path: Path) -> None:
    faults = judged_trainer(pools, tmp_path, "gradients_not_divided").faults()
    (summed,) = (seen for seen in faults if seen.fault == "gradients-summed")
    assert (summed.laws, summed.failing_already) == ([], ["gradients", "gradient-norm"])
    assert not any(seen.is_unseen for seen in faults), faults
