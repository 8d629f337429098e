"""Wrong functions, each with a law that it must fail; and a right one, which passes all laws."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast

import msgspec
import pytest
import torch

from conformance.judge.judge import Judged, judge
from conformance.judge.registry import asserted_laws
from conformance.judge.support import Machine
from conformance.judge.verdicts import Verdict
from conformance.laws.trainers.test_any_trainer import test_shards_partition_parameters as shards_partition_parameters
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from conformance.plan.matrix import FAULT_CELLS, TRAINER_CELLS, Case
from conformance.plan.substrates import SIM
from conformance.report.schema import CaseResult
from conformance.report.trainer import FaultSeen
from conformance.run.pool import Pools
from conformance.run.store import RecordStore
from conformance.subjects.evidence import Evidence, Reference, SubjectRecord
from conformance.subjects.running import SubjectRuns
from conformance.subjects.session import faults_seen
from tests.support import sample_reports

BY_ID = {cell.id: cell for cell in TRAINER_CELLS}
DP2, HSDP, TP = FAULT_CELLS
TRAFFIC = "tests.support.subjects_with_traffic"
LAWS = {
    law_id: asserted
    for law_id, asserted in asserted_laws().items()
    if asserted.law.scope.of == "any trainer" and asserted.law.substrates != SIM
}
"""Laws that need no device; for the others see `test_wrong_subjects_on_sim.py`."""


class JudgedTrainer(NamedTuple):
    """Verdicts on a trainer, and the store in which its records are."""

    name: str
    store: RecordStore
    judged: Sequence[Judged]

    def failing(self) -> set[str]:
        return {entry.case.law for entry in self.judged if entry.verdict == Verdict.FAIL}

    def reasons(self) -> set[str]:
        return {entry.reason for entry in self.judged if entry.verdict != Verdict.PASS}

    def verdicts(self, cell: Cell) -> set[Verdict]:
        return {entry.verdict for entry in self.judged if entry.case.cell == cell}

    def is_conformant(self) -> bool:
        return {entry.verdict for entry in self.judged} <= {Verdict.PASS, Verdict.UNSUPPORTED} and not self.failing()

    def faults(self) -> list[FaultSeen]:
        results = [result_of(entry) for entry in self.judged]
        return list(faults_seen(self.store, results, self.name, machine=machine(self.store)))


def machine(store: RecordStore) -> Machine:
    return Machine(hardware=store.hardware, torch_version=store.torch_version, max_world_size=8)


def judged_trainer(pools: Pools, directory: Path, name: str, *cells: Cell, limit_s: float = 60.0) -> JudgedTrainer:
    """Judge a function of `subject_models`, or another `MODULE:NAME`, on cells, by default on two ranks."""
    subject = name if ":" in name else f"tests.support.subject_models:{name}"
    store = RecordStore(directory, "test", str(torch.__version__), None, limit_s, pools, subject=subject)
    judged = [
        judge(case, asserted.law, asserted.test, store, machine=machine(store))
        for cell in cells or (DP2,)
        for asserted in LAWS.values()
        if asserted.law.scope.holds(cell) and (case := Case(asserted.law.id, cell, name))
    ]
    return JudgedTrainer(name, store, judged)


def result_of(judged: Judged) -> CaseResult:
    case = sample_reports.case(f"{judged.case.law}/{judged.case.cell.id}", judged.verdict.value, **judged.measured)
    return msgspec.structs.replace(case, id=judged.case.id, reason=judged.reason, substrate=judged.substrate)


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
    ("plain_ddp", "dp2-fp32-default-full", "fsdp-is-on"),
    ("gradients_not_divided", "dp2-fp32-default-full", "gradients"),
    ("local_clip", "dp2-fp32-default-full", "gradient-norm"),
    ("local_clip", "dp2-fp32-default-full", "parameters"),
    ("no_clip", "dp2-fp32-default-full", "clipping"),
    ("buffer_not_initialised", "dp2-fp32-default-meta", "initialised"),
    ("forgotten", "dp2-fp32-default-meta", "initialised"),
    ("optimizer_first", "dp2-fp32-default-full", "optimizer-holds-each-once"),
    ("optimizer_first", "dp2-fp32-default-full", "every-update"),
    ("precision_forgotten", "dp2-bf16mp-default-full", "bf16-is-used"),
    ("layer_without_policy", "dp2-bf16mp-default-full", "bf16-is-used"),
    ("layer_without_policy_beside_a_router", "dp2-bf16mp-default-full", "bf16-is-used"),
    ("optimizer_skips_a_rank", "dp2-bf16mp-default-full", "bf16-parameters"),
    (f"{TRAFFIC}:gathered_one_by_one", TP.id, "no-needless-collectives"),
    (f"{TRAFFIC}:no_such_module", TP.id, "tensor-parallelism-is-on"),
    ("masters_in_bf16", "dp2-bf16mp-default-full", "fp32-masters"),
    ("other_weights_on_each_rank", "dp2-fp32-default-full", "initial-weights"),
    ("not_replicated", "hsdp2x2-fp32-default-full", "replicas"),
    ("frozen_layer", "dp2-fp32-default-full", "optimizer-holds-each-once"),
    ("frozen_layer", "dp2-fp32-default-full", "every-update"),
    ("without_gradient", "dp2-fp32-default-full", "every-gradient"),
    ("local_clip", "dp2-fp32-default-full", "loss"),
    ("not_divided_in_bf16", "dp2-bf16mp-default-full", "bf16-gradients"),
    ("untied", "dp2-fp32-default-full-tied", "tied-weights"),
    ("untied", "dp2-fp32-default-full-tied", "gradients"),
    ("optimizer_not_loaded", "dp2-fp32-default-full-from.same", "parameters"),
    ("nothing_loaded", "dp2-fp32-default-full-from.same", "parameters"),
    ("layer_gathered_twice", "dp2-fp32-default-full", "parameters-are-gathered"),
    ("layer_not_reduced_over_replicas", "hsdp2x2-fp32-default-full", "gradients-are-reduced"),
    ("layer_not_synchronised", "dp2-fp32-default-full", "every-gradient"),
    ("layer_not_synchronised", "dp2-fp32-default-full-acc2", "every-gradient"),
    ("layer_not_synchronised", "dp2-fp32-default-full-acc2", "gradients-are-reduced"),
    ("nothing_synchronised", "dp2-fp32-default-full-acc2", "every-gradient"),
    ("nothing_reduced_over_replicas", "hsdp2x2-fp32-default-full", "gradients-are-reduced"),
    ("reduced_in_bf16", "dp2-fp32-default-full", "wire-dtypes"),
    ("ranks_reduce_differently", "dp2-fp32-default-full", "same-collectives"),
    ("local_clip", "dp2-fp32-default-full", "clipping-reduces-norms"),
    ("gradients_gathered_to_clip", "dp2-fp32-default-full", "clipping-reduces-norms"),
    ("kept_after_backward", "dp2-fp32-default-full", "resharded"),
]
"""Wrong trainer, cell, and the law that sees the fault."""


def test_every_law_of_any_trainer_can_fail() -> None:
    memory = {law for law in LAWS if law.startswith("memory-")}  # see the modules about memory and the device
    assert {law for _, _, law in SEEN_BY} | {"partition"} | memory == LAWS.keys()


@pytest.mark.parametrize(("name", "cell", "law"), SEEN_BY)
def test_a_wrong_function_fails_by_the_law_that_sees_it(
    pools: Pools, tmp_path: Path, name: str, cell: str, law: str
) -> None:
    trainer = judged_trainer(pools, tmp_path, name, BY_ID[cell])
    assert law in trainer.failing(), trainer.reasons()


@pytest.mark.parametrize(
    ("name", "cell", "problem"),
    [
        ("not_resumable", "dp2-fp32-default-full-from.same", "the run was made without functions that save and load"),
        ("without_save", "dp2-fp32-default-full-from.same", "the run has no methods save and load: let unsupported()"),
        ("late_and_silent", "dp2-fp32-default-full", "train() did not call observer.built()"),
        ("without_phases", "dp2-fp32-default-full", "call observer.phase('backward', step=...)"),
        ("raises", "dp2-fp32-default-full", "rank 1 raised RuntimeError: no such layer (subject_models.py:"),
        ("returns_a_number", "dp2-fp32-default-full", "parallelize returned a int: return the model, nothing, or"),
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
        ("late", ["dp2-fp32-default-full"]),
        ("meant", ["dp2-fp32-default-full", "dp2-fp32-default-meta"]),
        ("sum_declared", ["dp2-fp32-default-full"]),
        ("layer_that_computes_twice", ["dp2-fp32-default-full", "dp2-fp32-default-full-acc2"]),
        ("unused_layer_in_a_group_of_its_own", ["dp2-fp32-default-full"]),
        ("own_mesh_names", ["dp2-fp32-default-full"]),
        ("switched_off_and_on", ["dp2-fp32-default-full-acc2"]),
        ("reduced_by_the_loss", ["dp2-fp32-default-full-acc2"]),
        ("layer_kept_in_fp32", ["dp2-bf16mp-default-full"]),
        ("router_in_fp32", ["dp2-bf16mp-default-full"]),
        ("ignored_router", ["dp2-bf16mp-default-full"]),
    ],
)
def test_unusual_and_right_trainers_are_conformant(pools: Pools, tmp_path: Path, name: str, cells: list[str]) -> None:
    trainer = judged_trainer(pools, tmp_path, name, *(BY_ID[cell] for cell in cells))
    assert trainer.is_conformant(), trainer.reasons()


def test_a_model_that_is_built_in_train_must_be_initialised(pools: Pools, tmp_path: Path) -> None:
    cell = BY_ID["dp2-fp32-default-meta"]
    assert "initialised" in judged_trainer(pools, tmp_path, "late_and_uninitialised", cell).failing()


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
