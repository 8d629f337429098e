"""Blocks that forward passes leave out, on known cases: passes, gradients of one process, and gathers."""

import pytest
import torch
from msgspec.structs import replace

from conformance.oracles.emulation import emulated_step
from conformance.oracles.frozen import at_step, trained
from conformance.oracles.reference import initial_model, reference_run
from conformance.oracles.skipped import computed_blocks, leave_out
from conformance.plan.cells import AxisValue, Cell, cell_from_axes
from reference_trainer.checks import UsageError
from reference_trainer.config import Skipped, TrainerConfig
from reference_trainer.skipped import skip
from tests.fast.oracles.test_frozen import require_same_steps
from tests.fast.oracles.test_schedules import schedule

_TWO = Cell(accumulation=2, skipped="blocks").config


def test_trainer_and_oracle_leave_out_the_same() -> None:
    ours, theirs = initial_model(_TWO), initial_model(_TWO)
    for number in range(12):
        skip(ours, _TWO.skipped, forward=number)
        leave_out(theirs, _TWO, number % 2, step=number // 2)
        skipped = [[block.is_skipped for block in model.blocks.values()] for model in (ours, theirs)]
        assert skipped[0] == skipped[1] == [number % 4 == 3, number % 3 > 0]


def test_a_step_leaves_out_the_same_blocks_in_the_configuration_of_that_step() -> None:
    names = dict.fromkeys(("layers.0.ffn_norm.weight", "layers.1.ffn_norm.weight", "norm.weight"), 0)
    for step in range(6):
        alike = at_step(_TWO, step)
        assert trained(names, alike) == trained(names, _TWO, step=step)
        for index in range(2):
            assert computed_blocks(alike, index) == computed_blocks(_TWO, index, step=step)
    assert trained(names, _TWO, step=2).keys() == {"layers.0.ffn_norm.weight", "norm.weight"}
    assert trained(names, _TWO) == names


def test_evaluations_compute_all_blocks() -> None:
    model, tokens = initial_model(_TWO), torch.arange(8)[None]
    whole = model(tokens)
    skip(model, _TWO.skipped, forward=7)
    assert not torch.equal(model(tokens), whole)
    assert torch.equal(model.eval()(tokens), whole)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum"])
def test_one_process_leaves_alone_what_a_step_has_not_used(optimizer: str) -> None:
    config = cell_from_axes({"mesh": "dp1", "optimizer": optimizer, "clip": 0.0, "skipped": "block"}).config
    run = reference_run(config, dtype=torch.float64)
    model, options = initial_model(config).double(), config.optimizer
    parameters = dict(model.named_parameters())
    matrices, vectors = ([p for p in parameters.values() if (p.ndim >= 2) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    stepper: torch.optim.Optimizer = torch.optim.SGD(groups, momentum=options.momentum)
    if optimizer == "adamw":
        stepper = torch.optim.AdamW(groups, betas=(options.beta1, options.beta2), eps=options.eps)
    used = [{name.split(".")[1] for name in gradients if name.startswith("layers.")} for gradients in run.gradients]
    assert used == [{"0", "1"}, {"0"}, {"0"}]
    require_same_steps(run, config, parameters, stepper)


@pytest.mark.parametrize("axes", [{}, {"passes": 2}, {"gradient_sync": "last"}, {"mesh": "dp2-tp2"}])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_mesh_computes_what_one_process_does(axes: dict[str, AxisValue], step: int) -> None:
    config = cell_from_axes({"mesh": "dp2", "accumulation": 2, "skipped": "blocks", "clip": 0.0, **axes}).config
    # The samples of a step are those of the run: one process trains its steps with a rate of nothing.
    still = replace(config, optimizer=replace(config.optimizer, name="sgd", lr=1e-30))
    exact = reference_run(still, dtype=torch.float64)
    emulated = emulated_step(config, {name: p.float() for name, p in exact.initial.items()}, step=step)
    assert emulated.loss == pytest.approx(exact.losses[step], rel=1e-6)
    assert emulated.gradients.keys() == exact.gradients[step].keys()
    for name, gradient in exact.gradients[step].items():
        assert float((emulated.gradients[name] - gradient).norm() / gradient.norm()) < 2e-5, name


_USED_FIRST = "forward: G0 G1 G2 G3 backward: G2 S3 G1 S2 G0 S1 S0"


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({}, f"{_USED_FIRST} forward: G0 G1 G3 backward: G1 S3 G0 S1 S0"),
        # Gradients that wait are reduced at the end of the backward that does not reach the block.
        (
            {"gradient_sync": "last"},
            "forward: G0 G1 G2 G3 backward: G2 G1 G0 forward: G0 G1 G3 backward: G1 S3 G0 S1 S0 S2",
        ),
        # Explicit lists name the block whether it runs or not.
        ({"forward_prefetch": 1}, f"{_USED_FIRST} forward: G0 G1 G2 G3 backward: G1 S3 G0 S1 S0"),
        ({"backward_prefetch": 1}, f"{_USED_FIRST} forward: G0 G1 G3 backward: G2 S3 G1 G0 S1 S0"),
        # An evaluation computes the block, and leaves it unsharded for a forward that does not.
        (
            {"reshard": "never", "evaluation": "between-micro-batches"},
            "forward: G0 G1 G2 G3 backward: S3 S2 S1 S0 evaluate: G0 G1 G2 G3 backward: S3 S1 G3 S0",
        ),
        # Of two forward passes the second alone leaves the block out: its gradients are complete in the first.
        ({"passes": 2}, "forward: G0 G1 G2 G3 G0 G1 backward: G1 G0 G3 G2 S3 G1 S2 S1 S0"),
    ],
)
def test_a_block_that_is_left_out_is_not_gathered(axes: dict[str, AxisValue], expected: str) -> None:
    assert schedule(**{"mesh": "dp2", "accumulation": 2, "skipped": "block", **axes}) == expected


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"skipped": (Skipped(block=2, passes=(True,)),)}, "not among 2 layers"),
        ({"skipped": (Skipped(block=1, passes=(True,)),) * 2}, "named twice"),
        ({"skipped": _TWO.skipped, "implementation": "fsdp1", "init": "full"}, "fsdp1 with skipped"),
    ],
)
def test_what_cannot_be_left_out_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        TrainerConfig(**changes)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least one"):
        Skipped(block=0, passes=())
