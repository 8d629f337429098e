"""Traffic of tensor parallelism: right trainers pass the laws about it, and each wrong one fails by its law.

A hook of the model's own on saved tensors, as of `save_on_cpu`, takes the place of the ledger of saved activations.
"""

from pathlib import Path

import pytest

from conformance.judge.judge import Judged
from conformance.judge.verdicts import Verdict
from conformance.plan.matrix import TRAINER_CELLS
from conformance.run.pool import Pools
from tests.support.judged_trainers import judged_trainer

CELL = next(cell for cell in TRAINER_CELLS if cell.mesh == "dp2-tp2")
LAWS = ("gradients", "memory-by-phase", "no-needless-collectives", "tensor-parallelism-is-on")


def judged(pools: Pools, directory: Path, name: str) -> dict[str, Judged]:
    entries = judged_trainer(pools, directory, f"tests.support.subjects_with_traffic:{name}", CELL).judged
    return {entry.case.law: entry for entry in entries if entry.case.law in LAWS}


RIGHT = ("right", "replicated", "first_position", "checkpointed", "saved_on_cpu", "gathered_for_each_use")


@pytest.mark.parametrize("name", RIGHT)
def test_right_trainers_pass(pools: Pools, tmp_path: Path, name: str) -> None:
    entries = judged(pools, tmp_path, name)
    assert {law: (entry.verdict, entry.reason) for law, entry in entries.items()} == dict.fromkeys(
        LAWS, (Verdict.PASS, "")
    )


WRONG = {
    "gathered_one_by_one": ("no-needless-collectives", "sent again: 3 collectives"),  # one in each step
    "summed_for_a_share": ("no-needless-collectives", "own share read"),
    "back_and_forth": ("no-needless-collectives", "own share read"),
    "forth_and_back": ("no-needless-collectives", "and 1 more: sent a piece of a result"),
    "no_such_module": ("tensor-parallelism-is-on", "see the same data, and compute the same"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_trainers_fail(pools: Pools, tmp_path: Path, name: str) -> None:
    law, reason = WRONG[name]
    entry = judged(pools, tmp_path, name)[law]
    assert (entry.verdict, reason in entry.reason) == (Verdict.FAIL, True), entry.reason
