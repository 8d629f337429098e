"""Loss scaling: the oracle of scales, the bound on fp16 gradients, skipped steps, and a scaler that starts again."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from conformance.assertions.compare import distance
from conformance.assertions.steps import require_steps_taken
from conformance.instruments.facts import OptimizerGroup
from conformance.laws.state.test_ckpt import state_of_no_step, without_zero_counters
from conformance.oracles import tolerance
from conformance.oracles.emulation import emulated_step
from conformance.oracles.loss_scale import loss_scales, unscale_events
from conformance.oracles.reference import Tensors, initial_model
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from reference_trainer.checkpoint import Checkpoints, resume
from reference_trainer.config import LossScaleConfig, TrainerConfig
from reference_trainer.mesh import init_process_group
from reference_trainer.parallel_dims import resolve_mesh
from reference_trainer.train import Trainer

FP16 = Cell(mesh="dp2", precision="fp16-mp").config
FP16_REDUCED = Cell(mesh="hsdp2x2", precision="fp16-reduce", accumulation=2, gradient_sync="last").config
FP32 = Cell(mesh="dp2").config


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [
        ([], []),
        ([False] * 5, [8.0, 8.0, 16.0, 16.0, 32.0]),
        ([True, True, False, False, False], [8.0, 4.0, 2.0, 2.0, 4.0]),
        ([False, True, False, False, True], [8.0, 8.0, 4.0, 4.0, 8.0]),
    ],
)
def test_scales_of_steps(skipped: list[bool], expected: list[float]) -> None:
    assert loss_scales(LossScaleConfig(initial=8.0, growth_interval=2), skipped) == expected


def test_torch_has_the_scales_of_the_oracle() -> None:
    skipped = [False, True, False, False, False, True, False]
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scales = []
    for overflows in skipped:
        scales.append(scaler.get_scale())
        scaler.scale(parameter * (float("inf") if overflows else 1.0)).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scales == loss_scales(LossScaleConfig(initial=8.0, growth_interval=2), skipped)


@pytest.mark.parametrize(
    ("mesh", "groups"),
    [
        ("dp1", ["dp_shard"]),
        ("dp2", ["dp_shard", "dp_shard"]),
        ("tp2", ["tp", "tp"]),
        ("dp2-tp2", ["dp_shard", "tp", "world"]),
        ("hsdp2x2", ["dp_shard", "world"]),
    ],
)
def test_groups_that_agree_on_an_overflow(mesh: str, groups: list[str]) -> None:
    cell = Cell(mesh=mesh, precision="fp16-mp")
    config = cell.config
    dims = resolve_mesh(config.mesh, world_size=cell.world_size)
    assert [event.group for event in unscale_events(config, dims)] == groups
    assert unscale_events(cell.but(precision="bf16-mp").config, dims) == []


def gradients(config: TrainerConfig, *, scale: float = 1.0) -> Tensors:
    weights = {name: p.detach() for name, p in initial_model(config).named_parameters()}
    return emulated_step(config, weights, step=0, loss_scale=scale).gradients


@pytest.mark.parametrize("exponent", [-16, -8, 0, 8, 16])
@pytest.mark.parametrize("config", [FP16, FP16_REDUCED], ids=lambda config: config.precision)
def test_fp16_gradients_are_within_their_bound(config: TrainerConfig, exponent: int) -> None:
    """The bound holds at scales so small that most of a gradient is lost, too."""
    expected, emulated = gradients(FP32), gradients(config, scale=2.0**exponent)
    bounds = tolerance.fp16_gradients(config, expected, loss_scale=2.0**exponent)
    for name, bound in bounds.items():
        limit = bound.value * float(expected[name].norm())
        assert distance({name: emulated[name]}, {name: expected[name]}) <= limit, name


def test_without_its_term_for_underflow_the_bound_would_not_hold() -> None:
    expected, emulated = gradients(FP32), gradients(FP16, scale=2.0**-16)
    relative = min(bound.value for bound in tolerance.fp16_gradients(FP16, expected, loss_scale=2.0**100).values())
    zeros = {name: torch.zeros_like(grad) for name, grad in expected.items()}
    assert distance(emulated, expected) > relative * distance(expected, zeros)


@pytest.mark.parametrize("taken", [[], [1]])
def test_a_run_of_skipped_steps_is_a_failure(taken: list[int]) -> None:
    """Laws on steps that are taken would pass such a run with nothing judged."""
    record: Any = SimpleNamespace(steps=[0, 1], steps_taken=taken)
    with nullcontext() if taken else pytest.raises(ConformanceFailure, match="all of 2 steps are skipped"):
        require_steps_taken(record)


@pytest.mark.parametrize("moment", [0.0, 1e-30])
def test_a_resumed_run_of_skipped_steps_may_have_zeros_alone(moment: float) -> None:
    """An optimizer that has not stepped is saved with zeros by torch; the run that never stopped has no moments."""
    tensors = {"w": torch.tensor([0.0, moment])}
    resumed: Any = SimpleNamespace(kinds=lambda _when: ["exp_avg", "parameter"], select=lambda _prefix: tensors)
    with pytest.raises(ConformanceFailure, match="final/exp_avg of no step") if moment else nullcontext():
        assert state_of_no_step(resumed, ["parameter"], when="final") == ["exp_avg"]


@pytest.mark.parametrize(("counted", "left"), [([0.0], []), ([], []), ([1.0], [1.0])])
def test_a_counter_at_zero_is_that_of_no_step(counted: list[float], left: list[float]) -> None:
    assert without_zero_counters([group_of(counted)]) == [group_of(left)]


def group_of(steps: list[float]) -> OptimizerGroup:
    return OptimizerGroup(0.0, 0.01, ["w"], steps)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_scale_that_was_not_saved_begins_anew(tmp_path: Path) -> None:
    """A checkpoint of another precision has no scale; a scale that was saved goes on."""
    cpu = torch.device("cpu")
    bf16 = Cell(mesh="dp1", precision="bf16-mp").config
    fp16 = replace(bf16, precision="fp16-mp", loss_scale=LossScaleConfig(initial=2.0**20, growth_interval=2))
    init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1, timeout_s=60.0)
    try:
        for first, expected in ((bf16, 2.0**20), (fp16, 2.0**19)):
            directory = tmp_path / first.precision
            trainer = Trainer(first, device=cpu, world_size=1)
            trainer.train_step(0)
            Checkpoints(directory).save(trainer, steps_done=1)
            resumed = Trainer(fp16, device=cpu, world_size=1)
            assert resume(resumed, directory) == 1
            assert resumed.train_step(1).loss_scale == expected
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-foreach", "adamw-fused", "sgd-momentum"])
def test_an_optimizer_that_has_not_stepped_is_saved_without_a_trace_of_torchs_step(
    tmp_path: Path, optimizer: Any
) -> None:
    """Saving steps once, with gradients of zero, to have a state: that counts, and puts decay into momentum buffers."""
    config = Cell(mesh="dp1", optimizer=optimizer).config
    init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1, timeout_s=60.0)
    try:
        trainer = Trainer(config, device=torch.device("cpu"), world_size=1)
        Checkpoints(tmp_path / "saved").save(trainer, steps_done=0)
        resumed = Trainer(config, device=torch.device("cpu"), world_size=1)
        assert resume(resumed, tmp_path / "saved") == 0
    finally:
        dist.destroy_process_group()
    assert {len(state) for state in resumed.optimizer.state.values()} == {1 if optimizer == "sgd-momentum" else 3}
    assert not any(value.any() for state in resumed.optimizer.state.values() for value in state.values())
