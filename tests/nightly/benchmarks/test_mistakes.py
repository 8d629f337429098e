"""Classic mistakes of trainers, judged: the laws that see each one, and none that fails its correct twin."""

from pathlib import Path

import pytest

from benchmarks.located.mistakes import FOLDER, SHOWN, Mistake, mistakes
from conformance.plan.matrix import TRAINER_CELLS
from conformance.run.pool import Pools
from tests.support.judged_trainers import BY_ID, judged_trainer

MISTAKES = mistakes()


def test_the_trainer_without_mistakes_is_conformant(pools: Pools, tmp_path: Path) -> None:
    trainer = judged_trainer(pools, tmp_path, f"{FOLDER / 'trainer.py'}:Trainer", *TRAINER_CELLS)
    assert trainer.is_conformant(), trainer.reasons()


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_fails_by_the_laws_that_see_it_and_its_twin_conforms(
    pools: Pools, tmp_path: Path, mistake: Mistake
) -> None:
    shown = SHOWN[mistake.id]
    wrong = judged_trainer(pools, tmp_path / "wrong", mistake.wrong, BY_ID[shown.cell])
    assert wrong.failing() == shown.laws, wrong.reasons()
    right = judged_trainer(pools, tmp_path / "right", mistake.right, BY_ID[shown.cell])
    assert right.is_conformant(), right.reasons()
