"""Models of the kinds that other people's trainers train: right ones pass all laws, which see all faults."""

from pathlib import Path

import pytest

from conformance.judge.verdicts import Verdict
from conformance.run.pool import Pools
from tests.support.judged_trainers import BY_ID, judged_trainer

DP2, HSDP, TP = "dp2-fp32-default-full", "hsdp2x2-fp32-default-full", "dp2-tp2-fp32-default-full"
UNEVEN, META, BF16 = "dp2-fp32-default-full-acc2-uneven", "dp2-fp32-default-meta", "dp2-bf16mp-default-full"
CLIENTS = "tests.support.client_models"


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("by_tokens_of_all_ranks", [DP2, UNEVEN, HSDP]),
        ("sequence_parallel", [TP, "dp2-tp2-bf16mp-default-full"]),
        ("loss_of_sharded_logits", [TP]),
        ("unet", [DP2, HSDP, "dp2-bf16mp-default-full-acc2-offloadcpu"]),
        ("vision_transformer", [HSDP, META, BF16]),
        ("policy", [DP2, UNEVEN, HSDP]),
        ("untied_policy", [DP2]),
        ("experts_with_own_norm", [DP2, UNEVEN]),
    ],
)
def test_a_right_model_is_conformant_and_all_faults_are_seen(
    pools: Pools, tmp_path: Path, name: str, cells: list[str]
) -> None:
    trainer = judged_trainer(pools, tmp_path, f"{CLIENTS}:{name}", *(BY_ID[cell] for cell in cells))
    assert trainer.is_conformant(), trainer.reasons()
    assert [seen.fault for seen in trainer.faults() if seen.is_unseen] == []


def test_faults_are_seen_on_the_cells_that_run(pools: Pools, tmp_path: Path) -> None:
    """Laws that leave out tied weights, since another cell shows as much, hold there when that one raises."""
    cells = [BY_ID[cell] for cell in (DP2, "dp2-fp32-default-full-tied")]
    trainer = judged_trainer(pools, tmp_path, f"{CLIENTS}:policy_with_a_group_for_its_head", *cells)
    assert Verdict.PASS not in trainer.verdicts(BY_ID[DP2])
    seen = {fault.fault: fault for fault in trainer.faults()}
    assert {fault.cell for fault in seen.values()} == {"dp2-fp32-default-full-tied"}
    assert "memory-held" in seen["full-weights-kept"].laws
    assert "memory-of-steps" in seen["gradients-left"].laws
    assert [name for name, fault in seen.items() if fault.is_unseen] == []


def test_a_norm_of_its_own_shards_by_which_torch_scales_is_seen(pools: Pools, tmp_path: Path) -> None:
    trainer = judged_trainer(pools, tmp_path, f"{CLIENTS}:experts_with_local_norm")
    assert trainer.failing() >= {"clipping-reduces-norms", "gradient-norm", "parameters"}
