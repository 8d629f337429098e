"""Memory of trainers: right ones of many kinds pass the laws about memory, and each wrong one fails by its law."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from conformance.detection.case_judge import simulated_device
from conformance.judge.judge import Judged
from conformance.judge.verdicts import Verdict
from conformance.plan.matrix import FAULT_CELLS, TRAINER_CELLS
from conformance.run.devices.hardware import NO_DEVICES, Hardware
from conformance.run.pool import Pools
from tests.support.judged_trainers import judged_trainer

MODELS = "tests.support.subjects_with_memory"
LAWS = ("memory-held", "memory-by-phase", "memory-of-steps")
CELLS = [cell for cell in TRAINER_CELLS if "tp" not in cell.mesh and cell.saved_on == "none" and cell.init == "full"]


def judged(pools: Pools, directory: Path, name: str, *, hardware: Hardware, laws: Sequence[str] = LAWS) -> list[Judged]:
    return [*judged_trainer(pools, directory, f"{MODELS}:{name}", *CELLS, hardware=hardware, laws=laws).judged]


@pytest.fixture(params=["cpu", "sim"])
def hardware(request: pytest.FixtureRequest) -> Hardware:
    """Processors, and the simulated device where something can compile it."""
    return (simulated_device() if request.param == "sim" else None) or NO_DEVICES


RIGHT = (
    *("right", "checkpointed", "checkpointed_here", "adapted", "tabled", "with_foreach", "compiled"),
    *("always_resharded", "never_resharded", "one_group", "many_groups", "ahead", "to_smaller_shards"),
)


@pytest.mark.parametrize("name", RIGHT)
def test_right_trainers_pass(pools: Pools, tmp_path: Path, name: str, hardware: Hardware) -> None:
    verdicts = judged(pools, tmp_path, name, hardware=hardware)
    assert Verdict.PASS in {each.verdict for each in verdicts}
    wrong = [each for each in verdicts if each.verdict not in (Verdict.PASS, Verdict.UNSUPPORTED)]
    assert {f"{each.case.id}: {each.reason}" for each in wrong} == set()


def test_an_optimizer_that_gathers_matrices_passes(pools: Pools, tmp_path: Path) -> None:
    verdicts = judged(pools, tmp_path, "orthogonalised", hardware=NO_DEVICES)
    assert {each.reason for each in verdicts if each.verdict == Verdict.FAIL} == set()


WRONG = {
    "weights_kept": "held at the start of rank 0, backward of step 0",
    "full_gradients": "peak of rank 0, clip of step 0",
    "graph_kept": "held at the start of rank 0, clip of step 0",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_trainers_fail(pools: Pools, tmp_path: Path, name: str, hardware: Hardware) -> None:
    first = judged(pools, tmp_path, name, hardware=hardware, laws=["memory-by-phase"])[0]
    assert first.case.cell == FAULT_CELLS[0]
    assert (first.verdict, WRONG[name] in first.reason) == (Verdict.FAIL, True), first.reason
