"""Own loops whose optimizers take turns: a right one passes; a leak, a lost reduction, a wrong order are seen."""

from pathlib import Path

import pytest

from conformance.outcomes import CellFailed
from conformance.run.pool import Pools
from conformance.subjects.running import SubjectRuns
from tests.support.judged_trainers import BY_ID, DP2, judged_trainer, store_of

LOOPS = "tests.support.gan_loops"
ACCUMULATED = BY_ID["dp2-fp32-default-full-acc2"]


@pytest.mark.parametrize("name", ["right", "whole_networks"])
def test_a_right_loop_passes(shared_ranks: Pools, tmp_path: Path, name: str) -> None:
    assert judged_trainer(shared_ranks, tmp_path, f"{LOOPS}:{name}", DP2, ACCUMULATED).reasons() == set()


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("nothing_forgotten", "gradients"),
        ("not_detached", "gradients"),
        ("not_reduced", "gradients-are-reduced"),
        ("gathered_twice", "parameters-are-gathered"),
        ("kept_whole", "resharded"),
    ],
)
def test_a_mistake_is_seen(shared_ranks: Pools, tmp_path: Path, name: str, law: str) -> None:
    assert law in judged_trainer(shared_ranks, tmp_path, f"{LOOPS}:{name}", DP2).failing()


def test_another_order_of_optimizers_is_one_line(shared_ranks: Pools, tmp_path: Path) -> None:
    with pytest.raises(CellFailed) as raised:
        SubjectRuns(store_of(shared_ranks, tmp_path, f"{LOOPS}:generator_first")).evidence(DP2)
    assert (
        "AdamW, which trains generator, takes a step in the turn of discriminator: declare loss="
        in raised.value.failure.reason
    )
