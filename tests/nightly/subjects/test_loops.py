"""Own loops of many ways: those that are right pass, a mistake in each is seen, equal data of ranks are told."""

from pathlib import Path

import pytest

from conformance.judge.verdicts import Verdict
from conformance.outcomes import CellFailed
from conformance.run.pool import Pools
from conformance.subjects.running import SubjectRuns
from tests.nightly.subjects.test_wrong_subjects_on_sim import judged
from tests.support.judged_trainers import BY_ID, DP2, JudgedTrainer, judged_trainer

ACCUMULATED = BY_ID["dp2-fp32-default-full-acc2"]
VARIANTS = "tests.support.loop_variants"


def judged_loop(pools: Pools, directory: Path, name: str) -> JudgedTrainer:
    return judged_trainer(pools, directory, f"{VARIANTS}:{name}", ACCUMULATED)


RIGHT = (
    *("compiled_whole", "compiled_blocks", "reentrant", "metrics", "evaluating"),
    *("evaluating_reader", "averaging", "set_to_zero", "last_backward", "with_workers"),
    *("with_batch_sampler", "with_own_share", "with_seeds", "with_stream", "with_packed"),
    *("with_unseeded", "with_constant", "in_groups"),
)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_passes(pools: Pools, tmp_path: Path, name: str) -> None:
    trainer = judged_loop(pools, tmp_path, name)
    assert trainer.is_conformant(), trainer.reasons()
    passed = {entry.case.law for entry in trainer.judged if entry.verdict == Verdict.PASS}
    assert passed >= {"gradients", "parameters", "clipping"}


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("compiled_whole_local_clip", "clipping"),
        ("compiled_blocks_unreduced", "gradients-are-reduced"),
        ("reentrant_embedding", "every-gradient"),
        ("summed_metrics", "loss"),
        ("evaluation_trains", "gradients"),
        ("evaluation_trains_reader", "gradients"),
        ("average_left", "parameters"),
        ("never_unscaled", "gradients"),
        ("set_to_zero_by_micro_batch", "gradients"),
        ("in_full_groups", "gradients"),
    ],
)
def test_a_mistake_is_seen(pools: Pools, tmp_path: Path, name: str, law: str) -> None:
    assert law in judged_loop(pools, tmp_path, name).failing()


@pytest.mark.parametrize(
    "name", ["same_workers", "same_batch_sampler", "same_share", "same_seeds", "same_stream", "same_packed"]
)
def test_equal_data_on_ranks_are_told(pools: Pools, tmp_path: Path, name: str) -> None:
    trainer = judged_loop(pools, tmp_path, name)
    with pytest.raises(CellFailed) as raised:
        SubjectRuns(trainer.store).evidence(ACCUMULATED)
    assert "ranks would train on the same data" in raised.value.failure.reason


def test_a_loop_on_the_simulated_accelerator_is_judged(pools: Pools, tmp_path: Path) -> None:
    entries = judged(pools, tmp_path, f"{VARIANTS}:on_device", DP2)
    assert {entry.verdict for entry in entries} <= {Verdict.PASS, Verdict.UNSUPPORTED}
    assert not entries or {entry.case.law for entry in entries if entry.verdict == Verdict.PASS} >= {
        *("gradients", "clipping", "unordered-accesses", "schedules-agree", "memory-of-streams")
    }


def test_a_mistake_on_the_simulated_accelerator_is_seen(pools: Pools, tmp_path: Path) -> None:
    laws = ["clipping", "gradients"]
    entries = judged(pools, tmp_path, f"{VARIANTS}:on_device_local_clip", DP2, laws=laws)
    assert not entries or "clipping" in {entry.case.law for entry in entries if entry.verdict == Verdict.FAIL}
