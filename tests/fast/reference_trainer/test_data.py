"""Data, learning-rate schedule and optimizer groups, in one process."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from reference_trainer.config import DataConfig, ModelConfig, OptimizerConfig, TrainerConfig
from reference_trainer.data import IGNORED_LABEL, Batches, open_tokens
from reference_trainer.model import Transformer
from reference_trainer.optim import build_optimizer, build_schedule, learning_rate_factor, parameter_groups

SMALL = ModelConfig(vocab_size=13, dim=16, ffn_dim=24, max_seq_len=8, bias=True, tied_embeddings=True)


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp_size", "accumulation"), [(1, 1), (1, 4), (2, 2), (4, 1), (8, 1), (2, 4)])
def test_ranks_and_micro_batches_partition_the_global_batch(dp_size: int, accumulation: int) -> None:
    batches = Batches(DataConfig(seq_len=16, min_valid_fraction=0.5), vocab_size=61, seed=5)
    shares = [
        pair
        for rank in range(dp_size)
        for pair in batches.micro_batches(3, dp_rank=rank, dp_size=dp_size, accumulation=accumulation)
    ]
    for tensors, full in zip(zip(*shares, strict=True), batches.global_batch(3), strict=True):
        assert torch.equal(torch.cat(tensors), full)


def test_the_batch_depends_on_seed_and_step() -> None:
    def batch(seed: int, step: int) -> Tensor:
        return Batches(DataConfig(), vocab_size=256, seed=seed).global_batch(step)[0]

    assert torch.equal(batch(0, 1), batch(0, 1))
    assert not torch.equal(batch(0, 1), batch(0, 2))
    assert not torch.equal(batch(0, 1), batch(1, 1))


def test_an_indivisible_batch_is_refused() -> None:
    batches = Batches(DataConfig(), vocab_size=256, seed=0)
    with pytest.raises(ValueError, match=r"global_batch_size 8 is not divisible by .* = 3 x 1"):
        batches.micro_batches(0, dp_rank=0, dp_size=3, accumulation=1)


@pytest.mark.parametrize("dtype", [None, np.uint16, np.int64])
def test_labels_are_the_next_tokens(dtype: type[np.integer] | None, tmp_path: Path) -> None:
    """The file holds consecutive numbers, as bytes or `.npy`; tokens beyond the vocabulary are folded into it."""
    path = tmp_path / ("tokens.bin" if dtype is None else "tokens.npy")
    if dtype is None:
        path.write_bytes(bytes(range(200)))
    else:
        np.save(path, np.arange(200, dtype=dtype))
    inputs, labels = Batches(DataConfig(path=str(path), seq_len=10), vocab_size=61, seed=0).global_batch(0)
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs.shape == labels.shape == (8, 10)
    assert torch.equal(labels, (inputs + 1) % 61)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])


def test_every_position_of_a_file_is_used(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(range(12)))
    _, labels = Batches(
        DataConfig(path=str(path), seq_len=10, global_batch_size=32), vocab_size=61, seed=0
    ).global_batch(0)
    assert set(labels[:, -1].tolist()) == {10, 11}


def test_a_share_of_the_labels_is_ignored() -> None:
    config = DataConfig(seq_len=20, global_batch_size=512, min_valid_fraction=0.25)
    _, labels = Batches(config, vocab_size=256, seed=0).global_batch(0)
    valid = labels != IGNORED_LABEL
    assert set(valid.sum(1).tolist()) == set(range(5, 21))
    assert torch.equal(valid, valid.cummin(dim=1).values), "padding stands at the end"


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("missing.bin", lambda path: None, "is not a file"),
        ("empty.bin", lambda path: path.write_bytes(b""), "cannot be read as tokens: "),
        ("broken.npy", lambda path: path.write_bytes(b"no array"), "cannot be read as tokens: "),
        ("empty.npy", lambda path: path.write_bytes(b""), "cannot be read as tokens: "),
        ("table.npy", lambda path: np.save(path, np.zeros((2, 2), np.int64)), r"int64 of shape \(2, 2\), need a 1-d"),
        ("floats.npy", lambda path: np.save(path, np.zeros(9)), "holds float64 of shape"),
    ],
)
def test_files_that_hold_no_tokens(name: str, write: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write(path)
    with pytest.raises(ValueError, match=f"data.path {path} .*{message}|data.path {path} {message}"):
        open_tokens(str(path))


def test_a_file_shorter_than_a_sample_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(16))
    with pytest.raises(ValueError, match=r"has 16 tokens, need more than data.seq_len 16"):
        Batches(DataConfig(path=str(path), seq_len=16), vocab_size=256, seed=0)


# --- schedule, optimizer, clipping -----------------------------------------------------------------------------------


def test_learning_rate_rises_linearly_then_falls_on_a_cosine() -> None:
    config = TrainerConfig(optimizer=OptimizerConfig(warmup_steps=4, final_lr_fraction=0.2), steps=11)
    factors = [learning_rate_factor(step, config) for step in range(12)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[7] == pytest.approx(0.6), "half way from 1 to 0.2"
    assert factors[10:] == pytest.approx([0.2, 0.2])
    assert all(before > after for before, after in pairwise(factors[4:11]))


@pytest.mark.parametrize("steps", [5, 15])
def test_learning_rate_falls_over_its_own_number_of_steps(steps: int) -> None:
    falling = OptimizerConfig(warmup_steps=4, final_lr_fraction=0.2)
    expected = TrainerConfig(optimizer=falling, steps=11)
    config = TrainerConfig(optimizer=replace(falling, lr_decay_steps=11), steps=steps)
    for step in range(15):
        assert learning_rate_factor(step, config) == learning_rate_factor(step, expected)


@pytest.mark.parametrize("steps", [1, 5])
def test_learning_rate_is_constant_by_default(steps: int) -> None:
    assert {learning_rate_factor(step, TrainerConfig(steps=steps)) for step in range(steps)} == {1.0}


def test_schedule_scales_every_group() -> None:
    config = OptimizerConfig(lr=0.5, warmup_steps=1)
    optimizer = build_optimizer(Transformer(SMALL), config)
    schedule = build_schedule(optimizer, TrainerConfig(optimizer=config, steps=3))
    assert [float(rate) for rate in schedule.get_last_lr()] == [0.25, 0.25]


def test_matrices_decay_and_vectors_do_not() -> None:
    model = Transformer(SMALL)
    frozen = model.blocks[0].get_parameter("attention.wq.weight").requires_grad_(False)
    decayed, kept = build_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert all(names[id(p)].endswith(("norm.weight", ".bias")) for p in kept["params"])
    assert all(p.ndim == 2 and p is not frozen for p in decayed["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(names) - 1


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize(
    ("implementation", "foreach", "fused"),
    [("auto", None, None), ("for-loop", False, False), ("foreach", True, False), ("fused", False, True)],
)
def test_implementation_of_the_optimizer(name: Any, implementation: Any, foreach: object, fused: object) -> None:
    optimizer = build_optimizer(Transformer(SMALL), OptimizerConfig(name=name, implementation=implementation))
    assert {(group["foreach"], group["fused"]) for group in optimizer.param_groups} == {(foreach, fused)}


@pytest.mark.parametrize(("options", "moments"), [({}, 2), ({"name": "sgd"}, 0), ({"name": "sgd", "momentum": 0.9}, 1)])
def test_moments_are_those_that_torch_keeps(options: dict[str, Any], moments: int) -> None:
    config, model = OptimizerConfig(**options), Transformer(SMALL)
    optimizer = build_optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [sum(value.shape == p.shape for value in optimizer.state[p].values()) for p in model.parameters()]
    assert set(kept) == {config.moments} == {moments}


def test_groups_hold_tied_weights_once() -> None:
    model = Transformer(SMALL)
    held = [p for group in parameter_groups(model, weight_decay=0.1) for p in group["params"]]  # type: ignore[attr-defined]
    assert len({id(p) for p in held}) == len(held)
