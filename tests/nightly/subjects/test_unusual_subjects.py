"""Trainers that are right and unusual pass all laws; the faults next to them are seen."""

from pathlib import Path

import pytest

from conformance.run.pool import Pools
from tests.support.judged_trainers import BY_ID, judged_trainer

DP2, HSDP = "dp2-fp32-default-full", "hsdp2x2-fp32-default-full"
ACCUMULATED, META = "dp2-fp32-default-full-acc2", "dp2-fp32-default-meta"
UNEVEN, BF16 = "dp2-fp32-default-full-acc2-uneven", "dp2-bf16mp-default-full"
EXPERTS, UNUSUAL = "tests.support.subject_experts", "tests.support.unusual_subjects"


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("without_expert_parallelism", [DP2]),
        ("experts_ignored", [DP2, HSDP, ACCUMULATED]),
        ("experts_in_groups_of_their_own", [DP2, HSDP, ACCUMULATED]),
        ("experts_with_copies", [DP2, HSDP]),
    ],
)
def test_experts_that_ranks_hold_some_of_are_conformant(
    pools: Pools, tmp_path: Path, name: str, cells: list[str]
) -> None:
    trainer = judged_trainer(pools, tmp_path, f"{EXPERTS}:{name}", *(BY_ID[cell] for cell in cells))
    assert trainer.is_conformant(), trainer.reasons()


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("spare", [DP2]),
        ("alternating", [DP2, ACCUMULATED]),
        ("probe_of_evaluation", [DP2]),
        ("adapters", [DP2]),
        ("frozen_and_ignored", [DP2]),
        ("trained_and_ignored", [DP2]),
        ("frozen_block", [DP2]),
        ("discriminator", [DP2]),
        ("sentinels", [DP2, META]),
        ("scratch", [DP2]),
        ("counting", [DP2]),
        ("odd_shapes", [DP2, HSDP]),
        ("columns", [DP2]),
        ("shared_block", [DP2]),
        ("recomputed", [DP2]),
        ("compiled", [DP2]),
        ("compiled_in_place_in_one_graph", [DP2]),
        ("never_resharded", [DP2]),
        ("head_in_fp32", [DP2, BF16]),
        ("prefetched", [DP2]),
        ("partly_resharded", [DP2, HSDP, BF16]),
        ("gathered_by_unshard", [DP2, ACCUMULATED, HSDP]),
        ("two_passes", [DP2, ACCUMULATED, HSDP, BF16]),
        ("another_method", [DP2, ACCUMULATED]),
        ("groups_and_decay", [DP2]),
        ("gradient_hooks", [DP2]),
        ("own_gathers", [DP2, HSDP]),
        ("towers", [DP2]),
        ("skipping_towers", [DP2, UNEVEN]),
        ("frozen_tower_of_some_ranks", [DP2, UNEVEN]),
        ("no_labels", [DP2]),
        ("auxiliary_in_loss", [DP2, ACCUMULATED, UNEVEN]),
    ],
)
def test_right_and_unusual_trainers_are_conformant(pools: Pools, tmp_path: Path, name: str, cells: list[str]) -> None:
    trainer = judged_trainer(pools, tmp_path, f"{UNUSUAL}:{name}", *(BY_ID[cell] for cell in cells))
    assert trainer.is_conformant(), trainer.reasons()


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("annealed", [DP2, ACCUMULATED]),
        ("iterated", [DP2, ACCUMULATED]),
        ("kept_between_calls", [DP2, UNEVEN]),
    ],
)
def test_state_beside_parameters_is_no_fault(pools: Pools, tmp_path: Path, name: str, cells: list[str]) -> None:
    trainer = judged_trainer(pools, tmp_path, f"tests.support.subjects_with_state:{name}", *(BY_ID[c] for c in cells))
    assert trainer.is_conformant(), trainer.reasons()


@pytest.mark.parametrize(
    ("name", "failing"),
    [
        (f"{EXPERTS}:experts_not_divided", {"gradients", "parameters", "loss", "gradient-norm"}),
        (f"{EXPERTS}:gate_left_out", {"fsdp-is-on", "replicas"}),
        (f"{UNUSUAL}:trained_ignored_and_not_reduced", {"replicas"}),
        (f"{UNUSUAL}:running_statistics", {"replicas"}),
    ],
)
def test_faults_next_to_them_are_seen(pools: Pools, tmp_path: Path, name: str, failing: set[str]) -> None:
    assert failing <= judged_trainer(pools, tmp_path, name).failing()


def test_a_forgotten_precision_is_seen_beside_a_layer_in_fp32(pools: Pools, tmp_path: Path) -> None:
    judged = judged_trainer(pools, tmp_path, f"{UNUSUAL}:precision_of_a_block_forgotten", BY_ID[BF16])
    assert "bf16-is-used" in judged.failing(), judged.reasons()


def test_experts_that_are_no_dtensors_are_refused_in_one_line(pools: Pools, tmp_path: Path) -> None:
    reasons = judged_trainer(pools, tmp_path, f"{EXPERTS}:experts_as_plain_tensors").reasons()
    problem = "a rank's shard of it, as of experts, must be a DTensor, see DTensor.from_local"
    assert all(problem in reason for reason in reasons)
