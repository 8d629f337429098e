"""Own loops whose optimizers take turns: a right one passes; a leak, a lost reduction, a wrong order are seen."""

from pathlib import Path

import pytest
import torch

from conformance.judge.judge import judge
from conformance.judge.registry import asserted_laws
from conformance.judge.support import Machine
from conformance.judge.verdicts import Verdict
from conformance.outcomes import CellFailed
from conformance.plan.matrix import TRAINER_CELLS, Case
from conformance.plan.substrates import SIM
from conformance.run.pool import Pools
from conformance.run.store import RecordStore
from conformance.subjects.running import SubjectRuns

LOOPS = "tests.support.gan_loops"
DP2, ACCUMULATED = (
    next(cell for cell in TRAINER_CELLS if cell.id == f"dp2-fp32-default-full{more}") for more in ("", "-acc2")
)


def store_of(pools: Pools, directory: Path, name: str) -> RecordStore:
    return RecordStore(directory, "test", str(torch.__version__), None, 60.0, pools, subject=f"{LOOPS}:{name}")


def failing(pools: Pools, directory: Path, name: str, *cells: object) -> list[str]:
    """Return the laws that fail, or cannot be judged, on cells."""
    store = store_of(pools, directory, name)
    machine = Machine(hardware=store.hardware, torch_version=store.torch_version, max_world_size=8)
    laws = [
        each for each in asserted_laws().values() if each.law.scope.of == "any trainer" and each.law.substrates != SIM
    ]
    cases = [(each, cell) for cell in TRAINER_CELLS if cell in cells for each in laws if each.law.scope.holds(cell)]
    judged = [judge(Case(each.law.id, cell, name), each.law, each.test, store, machine=machine) for each, cell in cases]
    return [entry.case.law for entry in judged if entry.verdict != Verdict.PASS]


def test_a_right_loop_passes(pools: Pools, tmp_path: Path) -> None:
    assert failing(pools, tmp_path, "right", DP2, ACCUMULATED) == []


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("nothing_forgotten", "gradients"),
        ("not_detached", "gradients"),
        ("not_reduced", "gradients-are-reduced"),
        ("gathered_twice", "parameters-are-gathered"),
    ],
)
def test_a_mistake_is_seen(pools: Pools, tmp_path: Path, name: str, law: str) -> None:
    assert law in failing(pools, tmp_path, name, DP2)


def test_another_order_of_optimizers_is_one_line(pools: Pools, tmp_path: Path) -> None:
    with pytest.raises(CellFailed) as raised:
        SubjectRuns(store_of(pools, tmp_path, "generator_first")).evidence(DP2)
    assert (
        "AdamW, which trains generator, takes a step in the turn of discriminator: declare loss="
        in raised.value.failure.reason
    )
