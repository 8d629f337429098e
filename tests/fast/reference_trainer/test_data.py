"""Data and the learning-rate schedule, in one process."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from reference_trainer.config import DataConfig, OptimizerConfig, TrainerConfig
from reference_trainer.data import IGNORED_LABEL, Batches, open_tokens
from reference_trainer.optim import learning_rate_factor


def test_the_batch_depends_on_seed_and_step() -> None:
    first, same = (Batches(DataConfig(), vocab_size=256, seed=0) for _ in range(2))
    other = Batches(DataConfig(), vocab_size=256, seed=1)
    assert torch.equal(first.global_batch(1)[0], same.global_batch(1)[0])
    assert not torch.equal(first.global_batch(1)[0], first.global_batch(2)[0])
    assert not torch.equal(first.global_batch(1)[0], other.global_batch(1)[0])
    with pytest.raises(ValueError, match=r"global_batch_size 8 is not divisible by .* = 3 x 1"):
        first.micro_batches(0, dp_rank=0, dp_size=3, accumulation=1)


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


def test_every_position_of_a_file_is_used_and_a_shorter_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(range(12)))
    config = DataConfig(path=str(path), seq_len=10, global_batch_size=32)
    _, labels = Batches(config, vocab_size=61, seed=0).global_batch(0)
    assert set(labels[:, -1].tolist()) == {10, 11}
    with pytest.raises(ValueError, match=r"has 12 tokens, need more than data.seq_len 12"):
        Batches(replace(config, seq_len=12), vocab_size=256, seed=0)


def test_learning_rate_rises_linearly_then_falls_on_a_cosine() -> None:
    config = TrainerConfig(optimizer=OptimizerConfig(warmup_steps=4, final_lr_fraction=0.2), steps=11)
    factors = [learning_rate_factor(step, config) for step in range(12)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[7] == pytest.approx(0.6), "half way from 1 to 0.2"
    assert factors[10:] == pytest.approx([0.2, 0.2])
    assert all(before > after for before, after in pairwise(factors[4:11]))
