"""Trainers on the simulated accelerator: right ones pass all laws, and each wrong one fails by the law that sees it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance.detection.case_judge import simulated_device
from conformance.judge.judge import Judged
from conformance.judge.verdicts import Verdict
from conformance.plan.cells import Cell, cell_from_id
from conformance.plan.matrix import TRAINER_CELLS
from conformance.plan.substrates import SIM
from conformance.run.pool import Pools
from tests.support.judged_trainers import ALL_LAWS, DP2, HSDP, judged_trainer

MODELS = "tests.support.subjects_on_device"
REFERENCE = "conformance.subjects.shipped.reference:ReferenceTrainer"
OFFLOADED = DP2.but(offload="cpu")
RACES = {
    "offload-copy-not-awaited": "dp2-bf16mp-default-full-acc2-offloadcpu",
    "offload-source-released": "hsdp2x2-fp32-default-full-offloadcpu",
}
"""Cell of other trainers on which a race of torch shows."""


def judged(pools: Pools, directory: Path, name: str, cell: Cell, **options: Any) -> Sequence[Judged]:
    """Judge a trainer on a cell by these laws, or by all; nothing where nothing can compile the device."""
    hardware = simulated_device()
    subject = name if ":" in name else f"{MODELS}:{name}"
    options = {"laws": ALL_LAWS, **options}
    return judged_trainer(pools, directory, subject, cell, hardware=hardware, **options).judged if hardware else []


def problems(verdicts: Sequence[Judged]) -> dict[str, str]:
    """Return the reasons of all cases that have not passed, by law."""
    return {each.case.law: each.reason for each in verdicts if each.verdict != Verdict.PASS}


@pytest.mark.parametrize("cell", TRAINER_CELLS, ids=lambda cell: cell.id)
def test_the_reference_trainer_passes_every_law(pools: Pools, tmp_path: Path, cell: Cell) -> None:
    assert problems(judged(pools, tmp_path, REFERENCE, cell)) == {}


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("right", DP2),
        ("right", OFFLOADED),
        ("right", HSDP),
        ("own_mesh", DP2),
        ("clip_awaited", DP2),
        ("copied_ahead", DP2),
        ("kept_between_passes", DP2),
    ],
    ids=lambda value: value.id if isinstance(value, Cell) else value,
)
def test_right_trainers_pass_every_law(pools: Pools, tmp_path: Path, name: str, cell: Cell) -> None:
    assert problems(judged(pools, tmp_path, name, cell)) == {}


SEEN_BY = [
    ("clip_not_awaited", DP2, "unordered-accesses", "aten::"),
    ("clip_not_awaited", DP2, "schedules-agree", "changed under schedule"),
    ("copies_not_recorded", DP2, "unordered-accesses", "may be given the memory of"),
    (
        "activations_wait_for_a_stream",
        DP2,
        "memory-of-streams",
        "waiting for streams in|above that of a device that keeps up",
    ),
    ("full_weights_stay", DP2, "memory-held", "when the model is built"),
    ("group_stays_gathered", DP2, "memory-held", "after step 0"),
    ("not_offloaded", OFFLOADED, "memory-held", "parameters on the device although offloaded"),
    ("gradients_kept", DP2, "memory-of-steps", "left by a step|growth of the peak"),
]
"""Wrong trainer, cell, the law that sees the fault, and words of its reason."""


def test_every_law_about_a_device_can_fail() -> None:
    assert {law for _, _, law, _ in SEEN_BY} >= {law for law, each in ALL_LAWS.items() if each.law.substrates == SIM}


@pytest.mark.parametrize(
    ("name", "cell", "law", "words"), SEEN_BY, ids=[f"{name}-{law}" for name, _, law, _ in SEEN_BY]
)
def test_a_wrong_trainer_fails_by_the_law_that_sees_it(
    pools: Pools, tmp_path: Path, name: str, cell: Cell, law: str, words: str
) -> None:
    for verdict in judged(pools, tmp_path, name, cell, laws=[law]):
        assert verdict.verdict == Verdict.FAIL
        assert any(word in verdict.reason for word in words.split("|")), verdict.reason


@pytest.mark.parametrize("defect", RACES)
@pytest.mark.parametrize("law", ["unordered-accesses", "schedules-agree"])
def test_a_race_of_torch_is_caught_and_its_twin_is_not(pools: Pools, tmp_path: Path, defect: str, law: str) -> None:
    cell = cell_from_id(RACES[defect])
    for twin, expected in ((".twin", Verdict.PASS), ("", Verdict.FAIL)):
        verdicts = judged(pools, tmp_path, REFERENCE, cell, laws=[law], defect=defect + twin)
        assert {each.verdict for each in verdicts} <= {expected}, problems(verdicts)


@pytest.mark.parametrize("defect", ["copy-in-before-optimizer", "gathered-released-in-forward"])
def test_the_loop_of_the_suite_hides_no_race_by_waiting_for_a_loss(pools: Pools, tmp_path: Path, defect: str) -> None:
    for twin, expected in ((".twin", Verdict.PASS), ("", Verdict.FAIL)):
        verdicts = judged(pools, tmp_path, "right", DP2, laws=["unordered-accesses"], defect=defect + twin)
        assert {each.verdict for each in verdicts} <= {expected}, problems(verdicts)


def test_a_group_that_stays_gathered_is_seen_in_the_loop_of_the_suite(pools: Pools, tmp_path: Path) -> None:
    defect = "reshard-after-backward-skipped"
    for twin, expected in ((".twin", Verdict.PASS), ("", Verdict.FAIL)):
        verdicts = judged(pools, tmp_path, "right", DP2, laws=["memory-held"], defect=defect + twin)
        assert {each.verdict for each in verdicts} <= {expected}, problems(verdicts)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("on_cpu", "up.weight of the parallel model is on cpu ("),
        ("mesh_of_cpu", "up.weight of the parallel model is on cpu (subjects_on_device.py:"),
        ("mesh_of_cuda", "(subjects_on_device.py:"),
        ("moves_to_cuda", "Torch not compiled with CUDA enabled (subjects_on_device.py:"),
    ],
)
def test_code_that_names_a_device_is_told_what_to_write(pools: Pools, tmp_path: Path, name: str, problem: str) -> None:
    for verdict in judged(pools, tmp_path, name, DP2, laws=["unordered-accesses"]):
        assert problem in verdict.reason
        assert "torch.accelerator.current_accelerator()" in verdict.reason
