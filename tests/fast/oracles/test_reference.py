"""Single-process references: their formulas, compared with torch's own and with finite differences."""

from collections.abc import Iterator

import msgspec
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor

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
from reference_trainer.config import DataConfig, ModelConfig, OptimizerConfig, TrainerConfig
from reference_trainer.data import IGNORED_LABEL, Batches
from reference_trainer.init_weights import normal
from reference_trainer.optim import build_schedule

CONFIG = TrainerConfig(
    model=ModelConfig(
        vocab_size=61,
        dim=16,
        n_layers=2,
        ffn_dim=24,
        max_seq_len=16,
        bias=True,
        init_std=0.2,
        bias_std=0.1,
        norm_std=0.2,
    ),
    data=DataConfig(seq_len=16, global_batch_size=4, min_valid_fraction=0.25),
    optimizer=OptimizerConfig(lr=0.05, weight_decay=0.3, eps=1e-3, max_norm=0.5),
    steps=3,
)
SGD = msgspec.structs.replace(CONFIG.optimizer, name="sgd")


def with_optimizer(optimizer: OptimizerConfig) -> TrainerConfig:
    return msgspec.structs.replace(CONFIG, optimizer=optimizer)


def batches_of(config: TrainerConfig) -> Iterator[tuple[Tensor, Tensor]]:
    batches = Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
    return map(batches.global_batch, range(config.steps))


def assert_equal(actual: Tensors, expected: Tensors, *, tolerance: float) -> None:
    torch.testing.assert_close(dict(actual), dict(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        with_optimizer(SGD),
        with_optimizer(msgspec.structs.replace(SGD, max_norm=0.0)),
        with_optimizer(msgspec.structs.replace(SGD, momentum=0.9)),
        msgspec.structs.replace(CONFIG, model=msgspec.structs.replace(CONFIG.model, tied_embeddings=True, bias=False)),
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


@pytest.mark.parametrize(
    ("norm", "max_norm", "factor"), [(4.0, 2.0, 2.0 / (4.0 + 1e-6)), (1.0, 2.0, 1.0), (9.0, 0.0, 1.0)]
)
def test_clip_factor(norm: float, max_norm: float, factor: float) -> None:
    assert clip_factor(norm, max_norm=max_norm) == factor


def test_total_norm_takes_any_iterable() -> None:
    assert total_norm((torch.full((2, 2), value) for value in (1.0, 2.0, 2.0)), order=2.0) == 6.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            msgspec.structs.replace(CONFIG, model=msgspec.structs.replace(CONFIG.model, dropout=0.1)),
            "draws no masks",
        ),
    ],
)
def test_unknown_options_are_refused(config: TrainerConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_reference(config, dtype=torch.float64)


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
    config = msgspec.structs.replace(with_optimizer(options), steps=8)
    schedule = build_schedule(torch.optim.SGD([torch.zeros(1)], lr=options.lr), config)
    for step in range(9):
        assert learning_rate(config, step) == pytest.approx(schedule.get_last_lr()[0], rel=1e-12), step
        schedule.optimizer.step()
        schedule.step()
