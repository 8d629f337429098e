"""Own loops without a call of the suite: right ones pass, a mistake is seen by its law, or is one line."""

from pathlib import Path

import pytest

from conformance.judge.verdicts import Verdict
from conformance.outcomes import CellFailed
from conformance.plan.cells import Cell
from conformance.run.pool import Pools
from conformance.subjects.running import SubjectRuns
from tests.support.judged_trainers import BY_ID, DP2, JudgedTrainer, judged_trainer, store_of

LOOPS = "tests.support.own_loops"
RESUMED = BY_ID["dp2-fp32-default-full-from.same"]
ACCUMULATED = BY_ID["dp2-fp32-default-full-acc2"]
UNEVEN, BF16 = BY_ID["dp2-fp32-default-full-acc2-uneven"], BY_ID["dp2-bf16mp-default-full"]


def judged(pools: Pools, directory: Path, name: str, cell: Cell = ACCUMULATED) -> JudgedTrainer:
    return judged_trainer(pools, directory, f"{LOOPS}:{name}", cell)


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
        ("scheduled_after_remaking", set()),
        ("matrices_apart", set()),
    ],
)
def test_right_loops_pass(shared_ranks: Pools, tmp_path: Path, name: str, unsupported: set[str]) -> None:
    trainer = judged(shared_ranks, tmp_path, name)
    assert trainer.is_conformant(), trainer.reasons()
    assert trainer.by_verdict(Verdict.UNSUPPORTED) <= unsupported
    assert trainer.by_verdict(Verdict.PASS) >= {"gradients", "parameters", "clipping"}


def test_a_loop_that_splits_uneven_batches_by_size_passes(shared_ranks: Pools, tmp_path: Path) -> None:
    trainer = judged(shared_ranks, tmp_path, "split_by_size", UNEVEN)
    assert trainer.is_conformant(), trainer.reasons()
    assert "gradients" in trainer.by_verdict(Verdict.PASS)


def test_a_loop_under_autocast_passes(shared_ranks: Pools, tmp_path: Path) -> None:
    trainer = judged(shared_ranks, tmp_path, "under_autocast", BF16)
    assert trainer.is_conformant(), trainer.reasons()
    assert {"bf16-gradients", "memory-by-phase"} <= trainer.by_verdict(Verdict.PASS)


def test_a_schedule_goes_on_when_a_run_is_resumed(shared_ranks: Pools, tmp_path: Path) -> None:
    trainer = judged(shared_ranks, tmp_path, "resumed_schedule", RESUMED)
    assert trainer.is_conformant(), trainer.reasons()
    assert "parameters" in trainer.by_verdict(Verdict.PASS)


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
def test_mistakes_are_seen(shared_ranks: Pools, tmp_path: Path, name: str, laws: set[str]) -> None:
    assert judged(shared_ranks, tmp_path, name).failing() >= laws


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("steps_in_backward", "an optimizer steps inside of the backward pass"),
        ("adversarial", "a second optimizer (SGD) steps parameters that the model of model= does not have"),
        ("two_optimizers", "2 optimizers train the model (SGD(lr=0.1, momentum=0.9), SGD(lr=0.1, momentum=0.9)),"),
        ("one_of_two", "a backward pass was seen before all optimizers of the model have stepped"),
        ("never_called", "no call of a model with the parameters of model= was seen"),
        ("other_optimizer", "declare optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)"),
        ("script_that_steps_elsewhere", "declare accumulation='even'"),
        ("script_with_a_limit_of_its_own", "the loop clips gradients to 1, and this run to "),
    ],
)
def test_what_cannot_be_judged_is_one_line(shared_ranks: Pools, tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(CellFailed) as raised:
        SubjectRuns(store_of(shared_ranks, tmp_path, f"{LOOPS}:{name}")).evidence(ACCUMULATED)
    reason = raised.value.failure.reason
    assert problem in reason
    assert "\n" not in reason


@pytest.mark.parametrize(("name", "noted"), [("own_groups", ACCUMULATED.id), ("own_groups_declared", "")])
def test_a_trainer_with_globals_gets_fresh_processes(pools: Pools, tmp_path: Path, name: str, noted: str) -> None:
    runs = SubjectRuns(store_of(pools, tmp_path, f"{LOOPS}:{name}"))
    for cell in (DP2, ACCUMULATED):
        runs.evidence(cell)
    assert runs.fresh_processes.cell == noted
