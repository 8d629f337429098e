"""Trainers that are right and unusual pass all laws; the faults next to them are seen."""

from pathlib import Path

import pytest

from conformance.run.pool import Pools
from tests.support.judged_trainers import BY_ID, judged_trainer

DP2, HSDP = "dp2-fp32-default-full", "hsdp2x2-fp32-default-full"
ACCUMULATED, META = "dp2-fp32-default-full-acc2", "dp2-fp32-default-meta"
UNEVEN, BF16 = "dp2-fp32-default-full-acc2-uneven", "dp2-bf16mp-default-full"
EXPERTS, UNUSUAL = "tests.support.subject_experts", "tests.support.unusual_subjects"


RIGHT_ON_TWO_RANKS = (
    *("spare", "probe_of_evaluation", "adapters", "frozen_and_ignored"),
    *("trained_and_ignored", "frozen_block", "discriminator", "scratch"),
    *("counting", "columns", "shared_block", "recomputed"),
    *("compiled", "compiled_in_place_in_one_graph", "never_resharded", "prefetched"),
    *("groups_and_decay", "gradient_hooks", "towers", "no_labels"),
)


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        *((name, [DP2]) for name in RIGHT_ON_TWO_RANKS),
        ("alternating", [DP2, ACCUMULATED]),
        ("sentinels", [DP2, META]),
        ("odd_shapes", [DP2, HSDP]),
        ("head_in_fp32", [DP2, BF16]),
        ("partly_resharded", [DP2, HSDP, BF16]),
        ("gathered_by_unshard", [DP2, ACCUMULATED, HSDP]),
        ("two_passes", [DP2, ACCUMULATED, HSDP, BF16]),
        ("another_method", [DP2, ACCUMULATED]),
        ("own_gathers", [DP2, HSDP]),
        ("skipping_towers", [DP2, UNEVEN]),
        ("frozen_tower_of_some_ranks", [DP2, UNEVEN]),
        ("auxiliary_in_loss", [DP2, ACCUMULATED, UNEVEN]),
        (f"{EXPERTS}:without_expert_parallelism", [DP2]),
        (f"{EXPERTS}:experts_ignored", [DP2, HSDP, ACCUMULATED]),
        (f"{EXPERTS}:experts_in_groups_of_their_own", [DP2, HSDP, ACCUMULATED]),
        (f"{EXPERTS}:experts_with_copies", [DP2, HSDP]),
    ],
)
def test_right_and_unusual_trainers_are_conformant(pools: Pools, tmp_path: Path, name: str, cells: list[str]) -> None:
    subject = name if ":" in name else f"{UNUSUAL}:{name}"
    trainer = judged_trainer(pools, tmp_path, subject, *(BY_ID[cell] for cell in cells))
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
    ("name", "cell", "failing"),
    [
        (f"{EXPERTS}:experts_not_divided", DP2, {"gradients", "parameters", "loss", "gradient-norm"}),
        (f"{EXPERTS}:gate_left_out", DP2, {"fsdp-is-on", "replicas"}),
        (f"{UNUSUAL}:trained_ignored_and_not_reduced", DP2, {"replicas"}),
        (f"{UNUSUAL}:running_statistics", DP2, {"replicas"}),
        (f"{UNUSUAL}:precision_of_a_block_forgotten", BF16, {"bf16-is-used"}),
    ],
)
def test_faults_next_to_them_are_seen(pools: Pools, tmp_path: Path, name: str, cell: str, failing: set[str]) -> None:
    trainer = judged_trainer(pools, tmp_path, name, BY_ID[cell])
    assert failing <= trainer.failing(), trainer.reasons()


def test_experts_that_are_no_dtensors_are_refused_in_one_line(pools: Pools, tmp_path: Path) -> None:
    reasons = judged_trainer(pools, tmp_path, f"{EXPERTS}:experts_as_plain_tensors").reasons()
    problem = "a rank's shard of it, as of experts, must be a DTensor, see DTensor.from_local"
    assert all(problem in reason for reason in reasons)
