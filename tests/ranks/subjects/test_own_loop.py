"""Own loops without a call of the suite: right ones pass, a mistake is seen by its law, or is one line."""

from pathlib import Path

import pytest
import torch

from conformance.judge.judge import judge
from conformance.judge.registry import asserted_laws
from conformance.judge.support import Machine
from conformance.judge.verdicts import Verdict
from conformance.outcomes import CellFailed
from conformance.plan.cells import Cell
from conformance.plan.matrix import TRAINER_CELLS, Case
from conformance.plan.substrates import SIM
from conformance.run.pool import Pools
from conformance.run.store import RecordStore
from conformance.subjects.running import SubjectRuns

LOOPS = "tests.support.own_loops"
BY_ID = {cell.id: cell for cell in TRAINER_CELLS}
RESUMED = BY_ID["dp2-fp32-default-full-from.same"]
DP2, ACCUMULATED = BY_ID["dp2-fp32-default-full"], BY_ID["dp2-fp32-default-full-acc2"]
UNEVEN, BF16 = BY_ID["dp2-fp32-default-full-acc2-uneven"], BY_ID["dp2-bf16mp-default-full"]
LAWS = {
    law: asserted
    for law, asserted in asserted_laws().items()
    if asserted.law.scope.of == "any trainer" and asserted.law.substrates != SIM
}


def store_of(pools: Pools, directory: Path, name: str) -> RecordStore:
    return RecordStore(directory, "test", str(torch.__version__), None, 60.0, pools, subject=f"{LOOPS}:{name}")


def reasons(pools: Pools, directory: Path, name: str, verdict: Verdict, cell: Cell = ACCUMULATED) -> dict[str, str]:
    """Return the reasons of a verdict on a cell, by law."""
    store = store_of(pools, directory, name)
    machine = Machine(hardware=store.hardware, torch_version=store.torch_version, max_world_size=8)
    cases = [(Case(law, cell, name), each) for law, each in LAWS.items() if each.law.scope.holds(cell)]
    judged = [judge(case, each.law, each.test, store, machine=machine) for case, each in cases]
    return {entry.case.law: entry.reason for entry in judged if entry.verdict == verdict}


@pytest.mark.parametrize(
    ("name", "unsupported"),
    [
        ("script", {"initial-weights"}),
        ("right", set()),
        ("other_model", set()),
        ("own_clip", {"gradient-norm"}),
        ("averaged_at_the_end", {"gradient-norm"}),
        ("unclipped", {"gradient-norm"}),
        ("gathered_ahead", set()),
        ("taught", set()),
        ("sync_always", set()),
        ("closure", {"loss"}),
        ("recomputed", set()),
        ("two_calls", set()),
        ("scaled", {"gradient-norm"}),
        ("one_backward", set()),
        ("divided_afterwards", {"loss"}),
        ("scheduled", set()),
        ("matrices_apart", set()),
    ],
)
def test_right_loops_pass(pools: Pools, tmp_path: Path, name: str, unsupported: set[str]) -> None:
    assert reasons(pools, tmp_path, name, Verdict.FAIL) == {}
    assert reasons(pools, tmp_path, name, Verdict.UNSUPPORTED).keys() <= unsupported
    assert reasons(pools, tmp_path, name, Verdict.PASS).keys() >= {"gradients", "parameters", "clipping"}


def test_a_loop_that_splits_uneven_batches_by_size_passes(pools: Pools, tmp_path: Path) -> None:
    assert reasons(pools, tmp_path, "split_by_size", Verdict.FAIL, UNEVEN) == {}
    assert "gradients" in reasons(pools, tmp_path, "split_by_size", Verdict.PASS, UNEVEN)


def test_a_loop_under_autocast_passes(pools: Pools, tmp_path: Path) -> None:
    assert reasons(pools, tmp_path, "under_autocast", Verdict.FAIL, BF16) == {}
    assert {"bf16-gradients", "memory-by-phase"} <= {*reasons(pools, tmp_path, "under_autocast", Verdict.PASS, BF16)}


def test_a_schedule_goes_on_when_a_run_is_resumed(pools: Pools, tmp_path: Path) -> None:
    assert reasons(pools, tmp_path, "resumed_schedule", Verdict.FAIL, RESUMED) == {}
    assert "parameters" in reasons(pools, tmp_path, "resumed_schedule", Verdict.PASS, RESUMED)


@pytest.mark.parametrize(
    ("name", "laws"),
    [
        ("local_clip", {"clipping", "parameters", "clipping-reduces-norms"}),
        ("sync_never", {"every-gradient", "gradients-are-reduced"}),
        ("gradients_kept", {"gradients", "parameters"}),
        ("own_count", {"gradients", "parameters"}),
        ("optimizer_first", {"optimizer-holds-each-once", "every-update"}),
        ("schedule_forgotten", {"parameters"}),
    ],
)
def test_mistakes_are_seen(pools: Pools, tmp_path: Path, name: str, laws: set[str]) -> None:
    assert reasons(pools, tmp_path, name, Verdict.FAIL).keys() >= laws


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("steps_in_backward", "an optimizer steps inside of the backward pass"),
        ("adversarial", "a second optimizer (SGD) steps parameters that the model of model= does not have"),
        (
            "two_optimizers",
            "2 optimizers train the model (SGD(lr=0.1, momentum=0.9), SGD(lr=0.1, momentum=0.9)), and the",
        ),
        ("one_of_two", "a backward pass was seen before all optimizers of the model have stepped"),
        ("never_called", "no call of a model with the parameters of model= was seen"),
        ("other_optimizer", "declare optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)"),
        ("script_that_steps_elsewhere", "declare accumulation='even'"),
        ("script_with_a_limit_of_its_own", "the loop clips gradients to 1, and this run to "),
    ],
)
def test_what_cannot_be_judged_is_one_line(pools: Pools, tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(CellFailed) as raised:
        SubjectRuns(store_of(pools, tmp_path, name)).evidence(ACCUMULATED)
    reason = raised.value.failure.reason
    assert problem in reason
    assert "\n" not in reason


@pytest.mark.parametrize(("name", "noted"), [("own_groups", ACCUMULATED.id), ("own_groups_declared", "")])
def test_a_trainer_with_globals_gets_fresh_processes(pools: Pools, tmp_path: Path, name: str, noted: str) -> None:
    runs = SubjectRuns(store_of(pools, tmp_path, name))
    for cell in (DP2, ACCUMULATED):
        runs.evidence(cell)
    assert runs.fresh_processes.cell == noted
