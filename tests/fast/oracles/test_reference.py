"""Single-process references: their formulas, optimizer, initial weights and loss scale."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from msgspec.structs import replace
from torch import Tensor

from conformance.assertions.compare import distance
from conformance.assertions.steps import require_steps_taken
from conformance.instruments.facts import OptimizerGroup
from conformance.laws.state.test_ckpt import state_of_no_step, without_zero_counters
from conformance.oracles import tolerance
from conformance.oracles.emulation import emulated_step
from conformance.oracles.initialisation import mean_bound, specified, spread_bounds
from conformance.oracles.loss_scale import loss_scales, unscale_events
from conformance.oracles.plain_optimizer import Start, plain_updates
from conformance.oracles.reference import (
    Tensors,
    clip_factor,
    initial_model,
    learning_rate,
    replay_updates,
    summed_loss,
    total_norm,
    train_reference,
)
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from reference_trainer.checkpoint import Checkpoints, resume
from reference_trainer.config import LossScaleConfig, ModelConfig, OptimizerConfig, TrainerConfig
from reference_trainer.data import IGNORED_LABEL, Batches
from reference_trainer.init_weights import normal
from reference_trainer.optim import build_schedule
from reference_trainer.parallel_dims import resolve_mesh
from reference_trainer.train import Trainer

CONFIG = replace(Cell(mesh="dp1").config, optimizer=OptimizerConfig(lr=0.05, weight_decay=0.3, eps=1e-3, max_norm=0.5))
CPU = torch.device("cpu")
SGD = replace(CONFIG.optimizer, name="sgd")


def batches_of(config: TrainerConfig) -> Iterator[tuple[Tensor, Tensor]]:
    batches = Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
    return map(batches.global_batch, range(config.steps))


def assert_equal(actual: Tensors, expected: Tensors, *, tolerance: float) -> None:
    torch.testing.assert_close(dict(actual), dict(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, optimizer=SGD),
        replace(CONFIG, optimizer=replace(SGD, max_norm=0.0)),
        replace(CONFIG, optimizer=replace(SGD, momentum=0.9)),
        replace(CONFIG, model=replace(CONFIG.model, tied_embeddings=True, bias=False)),
    ],
    ids=["adamw", "sgd", "sgd-unclipped", "sgd-momentum", "tied"],
)
def test_fp64_training_equals_torch(config: TrainerConfig) -> None:
    """The expected loss, gradients, norm, clipping and optimizer are those of torch's own functions."""
    run, model, options = train_reference(config, dtype=torch.float64), initial_model(config).double(), config.optimizer
    assert_equal(run.initial, dict(model.named_parameters()), tolerance=0.0)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if options.name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2), eps=options.eps)
    else:
        optimizer = torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum)
    for step, (inputs, labels) in enumerate(batches_of(config)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL)
        torch.autograd.backward(loss)
        assert run.losses[step] == pytest.approx(float(loss.detach()), rel=1e-12)
        assert_equal(run.gradients[step], gradients_of(model), tolerance=1e-12)
        norm = torch.nn.utils.clip_grad_norm_(parameters, options.max_norm or float("inf"))
        assert run.grad_norms[step] == pytest.approx(float(norm), rel=1e-12)
        assert not options.max_norm or norm > options.max_norm, "this test must clip"
        optimizer.step()
    assert_equal(run.parameters, dict(model.named_parameters()), tolerance=1e-12)
    for kind, tensors in run.optimizer_state.items():
        expected = {name: optimizer.state[p][kind] for name, p in model.named_parameters()}
        assert_equal(tensors, expected, tolerance=1e-12)


def gradients_of(model: torch.nn.Module) -> Tensors:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_are_those_of_finite_differences() -> None:
    run, model = train_reference(CONFIG, dtype=torch.float64), initial_model(CONFIG).double()
    batch = next(batches_of(CONFIG))
    valid_tokens, step = int((batch[1] != IGNORED_LABEL).sum()), 1e-6

    @torch.no_grad()
    def loss_after(p: Tensor, change: Tensor) -> float:
        p.add_(change)
        loss = float(summed_loss(model, batch)) / valid_tokens
        p.sub_(change)
        return loss

    for name, p in model.named_parameters():
        direction = normal(tuple(p.shape), name=name, seed=1).double()
        slope = (loss_after(p, step * direction) - loss_after(p, -step * direction)) / (2 * step)
        expected = float((run.gradients[0][name] * direction).sum())
        assert slope == pytest.approx(expected, rel=1e-6, abs=1e-8), name


def test_replaying_the_gradients_of_a_run_gives_its_parameters() -> None:
    run = train_reference(CONFIG, dtype=torch.float64)
    replayed = replay_updates(CONFIG, run.initial, dict(enumerate(run.gradients)))
    assert_equal(replayed.parameters, run.parameters, tolerance=0.0)
    assert replayed.grad_norms == run.grad_norms


def test_clip_factor_and_norm() -> None:
    cases = ((4.0, 2.0, 2.0 / (4.0 + 1e-6)), (1.0, 2.0, 1.0), (9.0, 0.0, 1.0))
    assert all(clip_factor(norm, max_norm=max_norm) == factor for norm, max_norm, factor in cases)
    assert total_norm((torch.full((2, 2), value) for value in (1.0, 2.0, 2.0)), order=2.0) == 6.0


def test_dropout_is_refused() -> None:
    with pytest.raises(ValueError, match="draws no masks"):
        train_reference(replace(CONFIG, model=replace(CONFIG.model, dropout=0.1)), dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [
        OptimizerConfig(),
        OptimizerConfig(warmup_steps=3),
        OptimizerConfig(final_lr_fraction=0.1),
        OptimizerConfig(warmup_steps=2, final_lr_fraction=0.25, lr_decay_steps=5),
    ],
)
def test_learning_rates_are_those_of_the_schedule(options: OptimizerConfig) -> None:
    config = replace(CONFIG, optimizer=options, steps=8)
    schedule = build_schedule(torch.optim.SGD([torch.zeros(1)], lr=options.lr), config)
    for step in range(9):
        assert learning_rate(config, step) == pytest.approx(schedule.get_last_lr()[0], rel=1e-12), step
        schedule.optimizer.step()
        schedule.step()


# Optimizer


OPTIMIZERS = [
    OptimizerConfig(name="adamw", lr=0.05, weight_decay=0.3, eps=1e-3, max_norm=0.0),
    OptimizerConfig(name="adamw", lr=0.05, weight_decay=0.3, eps=1e-3, max_norm=0.0, implementation="fused"),
    OptimizerConfig(name="sgd", lr=0.05, weight_decay=0.3, max_norm=0.0, momentum=0.9),
]
STEPS = range(4)


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    """Return a matrix, which decays, and a vector, which does not."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in {"w": (3, 5), "b": (5,)}.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: f"{each.name}-{each.implementation}")
def test_steps_are_those_of_the_formulas(optimizer: OptimizerConfig) -> None:
    config, initial, gradients = (
        replace(CONFIG, optimizer=optimizer),
        tensors(0),
        {step: tensors(step + 1) for step in STEPS},
    )
    expected = replay_updates(config, initial, gradients)
    assert plain_updates(config, initial, {}, start=Start()).keys() == {"parameter"}
    plain = plain_updates(config, initial, gradients, start=Start())
    assert plain.keys() == {"parameter", *expected.optimizer_state}
    for kind, named in {"parameter": expected.parameters, **expected.optimizer_state}.items():
        torch.testing.assert_close(plain[kind], dict(named), check_dtype=False, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: f"{each.name}-{each.implementation}")
def test_a_resumed_run_goes_on_in_every_bit(optimizer: OptimizerConfig, dtype: torch.dtype) -> None:
    config, initial = replace(CONFIG, optimizer=optimizer), tensors(0, dtype)
    gradients = {step: tensors(step + 1, dtype) for step in STEPS}
    whole = plain_updates(config, initial, gradients, start=Start())
    first = plain_updates(config, initial, {step: gradients[step] for step in STEPS[:2]}, start=Start())
    halfway = first.pop("parameter")
    rest = {step: gradients[step] for step in STEPS[2:]}
    resumed = plain_updates(config, halfway, rest, start=Start(dict.fromkeys(halfway, 2), first))
    for kind, named in whole.items():
        for name, tensor in named.items():
            assert torch.equal(resumed[kind][name], tensor), (kind, name)


# Initial weights


@pytest.mark.parametrize("numel", [8, 64, 1000, 100_000])
def test_normal_samples_are_inside(numel: int) -> None:
    samples = torch.randn(200, numel, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert float(samples.mean(1).abs().max()) < mean_bound(numel)
    least, most = spread_bounds(numel)
    spreads = samples.square().mean(1)
    assert least < float(spreads.min())
    assert float(spreads.max()) < most


def test_a_wrong_scale_is_outside_of_a_matrix() -> None:
    """A standard deviation that is too large by half shows in 1024 elements."""
    samples = 1.5 * torch.randn(1024, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert float(samples.square().mean()) > spread_bounds(1024)[1]
    assert float((samples + 0.5).mean()) > mean_bound(1024)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.0.attention_norm.weight", (1.0, 0.3)),
        ("norm.weight", (1.0, 0.3)),
        ("layers.0.attention.wk.bias", (0.0, 0.2)),
        ("layers.0.attention.wk.weight", (0.0, 0.1)),
        ("tok_embeddings.weight", (0.0, 0.1)),
    ],
)
def test_distribution_of_each_kind(name: str, expected: tuple[float, float]) -> None:
    assert specified(ModelConfig(init_std=0.1, bias_std=0.2, norm_std=0.3), name) == expected


# Loss scale


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


def test_a_run_of_skipped_steps_is_a_failure() -> None:
    """Laws on steps that are taken would pass such a run with nothing judged."""
    record: Any = SimpleNamespace(steps=[0, 1], steps_taken=[1])
    require_steps_taken(record)
    record.steps_taken = []
    with pytest.raises(ConformanceFailure, match="all of 2 steps are skipped"):
        require_steps_taken(record)


@pytest.mark.parametrize("moment", [0.0, 1e-30])
def test_a_resumed_run_of_skipped_steps_may_have_zeros_alone(moment: float) -> None:
    """An optimizer that has not stepped is saved with zeros by torch; the run that never stopped has no moments."""
    tensors = {"w": torch.tensor([0.0, moment])}
    resumed: Any = SimpleNamespace(kinds=lambda _when: ["exp_avg", "parameter"], select=lambda _prefix: tensors)
    with pytest.raises(ConformanceFailure, match="final/exp_avg of no step") if moment else nullcontext():
        assert state_of_no_step(resumed, ["parameter"], when="final") == ["exp_avg"]


def test_a_counter_at_zero_is_that_of_no_step() -> None:
    groups = [OptimizerGroup(0.0, 0.01, ["w"], steps) for steps in ([0.0], [], [1.0])]
    assert [group.steps for group in without_zero_counters(groups)] == [[], [], [1.0]]


@pytest.mark.usefixtures("mesh")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_scale_that_was_not_saved_begins_anew(tmp_path: Path) -> None:
    """A checkpoint of another precision has no scale; a scale that was saved goes on."""
    bf16 = Cell(mesh="dp1", precision="bf16-mp").config
    fp16 = replace(bf16, precision="fp16-mp", loss_scale=LossScaleConfig(initial=2.0**20, growth_interval=2))
    for first, expected in ((bf16, 2.0**20), (fp16, 2.0**19)):
        directory = tmp_path / first.precision
        trainer = Trainer(first, device=CPU, world_size=1)
        trainer.train_step(0)
        Checkpoints(directory).save(trainer, steps_done=1)
        resumed = Trainer(fp16, device=CPU, world_size=1)
        assert resume(resumed, directory) == 1
        assert resumed.train_step(1).loss_scale == expected


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-foreach", "adamw-fused", "sgd-momentum"])
def test_an_optimizer_that_has_not_stepped_is_saved_without_a_trace_of_torchs_step(
    tmp_path: Path, optimizer: Any
) -> None:
    """Saving steps once, with gradients of zero, to have a state: that counts, and puts decay into momentum buffers."""
    config = Cell(mesh="dp1", optimizer=optimizer).config
    Checkpoints(tmp_path).save(Trainer(config, device=CPU, world_size=1), steps_done=0)
    resumed = Trainer(config, device=CPU, world_size=1)
    assert resume(resumed, tmp_path) == 0
    assert {len(state) for state in resumed.optimizer.state.values()} == {1 if optimizer == "sgd-momentum" else 3}
    assert not any(value.any() for state in resumed.optimizer.state.values() for value in state.values())
