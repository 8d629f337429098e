"""Networks that are trained in turns on all meshes, in bf16 and resumed; the first causes of mistakes."""

from pathlib import Path

import pytest

from conformance.judge.verdicts import Verdict
from conformance.run.pool import Pools
from tests.ranks.subjects.test_causes import causes_of
from tests.support.judged_trainers import BY_ID, judged_trainer

LOOPS = "tests.support.gan_loops"
DP2, RESUMED = "dp2-fp32-default-full", "dp2-fp32-default-full-from.same"


@pytest.mark.parametrize(
    ("name", "cell", "law"),
    [
        ("right", "dp2-fp32-default-full-acc2", "clipping"),
        ("right", "dp2-fp32-default-full-acc2-uneven", "clipping"),
        ("right", "dp2-bf16mp-default-full", "clipping"),
        ("right", "hsdp2x2-fp32-default-full", "clipping"),
        ("right", "hsdp2x2-fp32-default-full-acc2-uneven", "clipping"),
        ("right", "dp2-tp2-fp32-default-full", "clipping"),
        ("right", "dp2-tp2-fp32-default-full-acc2-uneven", "clipping"),
        ("right", "dp2-tp2-bf16mp-default-full", "clipping"),
        ("scheduled", RESUMED, "parameters"),
        ("scheduled", "dp2-tp2-fp32-default-full-from.same", "parameters"),
    ],
)
def test_a_right_loop_passes(pools: Pools, tmp_path: Path, name: str, cell: str, law: str) -> None:
    """The schedules of each turn go on when a run is resumed."""
    trainer = judged_trainer(pools, tmp_path, f"{LOOPS}:{name}", BY_ID[cell])
    assert trainer.is_conformant(), trainer.reasons()
    assert law in trainer.by_verdict(Verdict.PASS)


@pytest.mark.parametrize(
    ("name", "cell", "sentence"),
    [
        ("one_forgotten", DP2, "this turn and those that the turn before has left in the same network"),
        ("nothing_forgotten", DP2, "this step and those that the step before has left: they are not set to zero"),
        ("not_detached", DP2, "are samples that one network makes detached before they are data of the other?"),
        ("discriminator_steps", DP2, "discriminator, takes a step in the turn of generator, once too often"),
        ("discriminator_steps_later", DP2, "takes a step in the turn of generator, once too often"),
        ("other_clipped", DP2, "the loop clips gradients of generator in the turn of discriminator"),
        ("not_reduced", DP2, "gradients are not reduced over the ranks in step 0"),
        ("schedule_not_loaded", RESUMED, "the learning rate of step 5 is 0.0005, and 0.00025 by the declared"),
        ("moments_not_loaded", RESUMED, "after loading, the optimizer's state exp_avg of generator.0."),
    ],
)
def test_a_mistake_has_its_cause(pools: Pools, tmp_path: Path, name: str, cell: str, sentence: str) -> None:
    first, *_ = causes_of(pools, tmp_path, f"{LOOPS}:{name}", [cell])
    assert sentence in first.sentence
