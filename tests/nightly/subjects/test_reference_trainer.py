"""The reference trainer as a subject: conformant on every cell, and every fault in its step is seen."""

from pathlib import Path

from conformance.judge.verdicts import Verdict
from conformance.plan.matrix import TRAINER_CELLS
from conformance.run.pool import Pools
from tests.support.judged_trainers import judged_trainer


def test_the_reference_trainer_conforms_by_the_laws_of_any_trainer(pools: Pools, tmp_path: Path) -> None:
    name = "conformance.subjects.shipped.reference:ReferenceTrainer"
    trainer = judged_trainer(pools, tmp_path, name, *TRAINER_CELLS)
    assert {entry.verdict for entry in trainer.judged} == {Verdict.PASS}, trainer.reasons()
    faults = trainer.faults()
    assert faults
    assert all(seen.laws for seen in faults), faults
