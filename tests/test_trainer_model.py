"""The trainer's building blocks in one process: model, initial weights, data, schedule, optimizer groups, clipping."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reference_trainer.config import DataConfig, ModelConfig, OptimizerConfig
from reference_trainer.data import IGNORED_LABEL, Batches, open_tokens
from reference_trainer.init_weights import init_weights, normal
from reference_trainer.loss import summed_cross_entropy
from reference_trainer.model import Transformer, apply_rope, rope_table
from reference_trainer.optim import build_optimizer, build_schedule, clip_gradients, learning_rate_factor
from reference_trainer.optim import parameter_groups as groups_of

SMALL = ModelConfig(
    vocab_size=13, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=24, max_seq_len=8, bias=True,
    init_std=0.3, bias_std=0.1, norm_std=0.2,
)  # fmt: skip
TOKENS = torch.tensor([[1, 5, 12, 0, 7, 3], [2, 2, 9, 11, 4, 6]])


def model_of(config: ModelConfig, *, seed: int = 0) -> Transformer:
    model = Transformer(config)
    init_weights(model, seed=seed)
    return model.double()


# --- model -----------------------------------------------------------------------------------------------------------


def naive_logits(model: Transformer, tokens: Tensor) -> Tensor:
    """A second implementation: complex rotations, one head and one query at a time, explicit softmax."""
    config, weights = model.config, dict(model.named_parameters(remove_duplicate=False))

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(()))

    def rms_norm(name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[f"{name}.weight"]

    def rotated(head: Tensor) -> Tensor:
        half = config.head_dim // 2
        frequencies = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(len(head), dtype=torch.float64)[:, None] * frequencies
        turned = torch.complex(head[:, :half], head[:, half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), dim=-1)

    def attention(name: str, x: Tensor) -> Tensor:
        q, k, v = (torch.split(linear(f"{name}.{part}", x), config.head_dim, dim=-1) for part in ("wq", "wk", "wv"))
        shared = config.n_heads // config.n_kv_heads
        outputs = []
        for head in range(config.n_heads):
            query, key, value = rotated(q[head]), rotated(k[head // shared]), v[head // shared]
            rows = []
            for t in range(len(x)):
                scores = (key[: t + 1] @ query[t] / math.sqrt(config.head_dim)).exp()
                rows.append(scores / scores.sum() @ value[: t + 1])
            outputs.append(torch.stack(rows))
        return linear(f"{name}.wo", torch.cat(outputs, dim=-1))

    def feed_forward(name: str, x: Tensor) -> Tensor:
        gate = linear(f"{name}.w1", x)
        return linear(f"{name}.w2", gate / (1 + (-gate).exp()) * linear(f"{name}.w3", x))

    def one(sample: Tensor) -> Tensor:
        x = weights["tok_embeddings.weight"][sample]
        for layer in range(config.n_layers):
            x = x + attention(f"layers.{layer}.attention", rms_norm(f"layers.{layer}.attention_norm", x))
            x = x + feed_forward(f"layers.{layer}.feed_forward", rms_norm(f"layers.{layer}.ffn_norm", x))
        return linear("output", rms_norm("norm", x))

    return torch.stack([one(sample) for sample in tokens])


@pytest.mark.parametrize(
    "changes",
    [{}, {"bias": False}, {"tied_embeddings": True}, {"n_kv_heads": 4}, {"n_kv_heads": 1}, {"rope_theta": 50.0}],
    ids=str,
)
def test_model_equals_a_second_implementation(changes: dict[str, int | float | bool]) -> None:
    model = model_of(msgspec.structs.replace(SMALL, **changes))
    with torch.no_grad():
        logits, expected = model(TOKENS), naive_logits(model, TOKENS)
    assert logits.shape == (*TOKENS.shape, SMALL.vocab_size)
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-6)  # the rope table is rounded to fp32


def test_gradients_are_those_of_finite_differences() -> None:
    model = model_of(msgspec.structs.replace(SMALL, tied_embeddings=True))
    labels = TOKENS.roll(-1, dims=1)
    torch.autograd.backward(summed_loss_fp64(model, labels))
    step = 1e-6
    for name, parameter in model.named_parameters():
        direction = normal(tuple(parameter.shape), name=name, seed=1).double()
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * step * direction)
                losses.append(summed_loss_fp64(model, labels))
                parameter.sub_(sign * step * direction)
        assert parameter.grad is not None
        slope = (parameter.grad * direction).sum()
        torch.testing.assert_close((losses[0] - losses[1]) / (2 * step), slope, rtol=1e-6, atol=1e-7, msg=name)


def summed_loss_fp64(model: Transformer, labels: Tensor) -> Tensor:
    logits: Tensor = model(TOKENS)
    return -logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).sum()


def test_a_token_sees_no_later_token() -> None:
    model = model_of(SMALL)
    changed = TOKENS.clone()
    changed[:, 4] = (changed[:, 4] + 1) % SMALL.vocab_size
    with torch.no_grad():
        before, after = model(TOKENS), model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.isclose(before[:, 4:], after[:, 4:]).all(-1).any()


def test_rope_is_relative_and_keeps_length() -> None:
    table = rope_table(SMALL)
    assert table.dtype == torch.float32
    q, k = (normal((1, 1, 1, 4), name=name, seed=0).expand(1, 8, 1, 4) for name in "qk")
    q_turned, k_turned = apply_rope(q, table), apply_rope(k, table)
    torch.testing.assert_close(q_turned.norm(dim=-1), q.norm(dim=-1))
    scores = q_turned[0, :, 0] @ k_turned[0, :, 0].T
    for offset in range(-7, 8):
        diagonal = scores.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-6)


def test_rope_rounds_bf16_once() -> None:
    x = normal((2, 8, 4, 4), name="x", seed=0).bfloat16()
    assert torch.equal(apply_rope(x, rope_table(SMALL)), apply_rope(x.float(), rope_table(SMALL)).bfloat16())


def test_recomputation_changes_no_bit() -> None:
    gradients = []
    for recompute in (False, True):
        model = model_of(msgspec.structs.replace(SMALL, dropout=0.5))
        for block in model.layers:
            block.recompute_in_backward = recompute  # type: ignore[assignment]
        torch.manual_seed(0)
        torch.autograd.backward(summed_loss_fp64(model, TOKENS))
        gradients.append([p.grad for p in model.parameters()])
    for kept, recomputed in zip(*gradients, strict=True):
        assert kept is not None
        assert recomputed is not None
        assert torch.equal(kept, recomputed)


def test_tied_embeddings_are_one_parameter() -> None:
    model = Transformer(msgspec.structs.replace(SMALL, tied_embeddings=True))
    assert model.output.weight is model.tok_embeddings.weight
    assert "output.weight" not in dict(model.named_parameters())
    assert Transformer(SMALL).output.weight is not Transformer(SMALL).tok_embeddings.weight


def test_rope_table_is_no_part_of_the_state() -> None:
    model = Transformer(SMALL)
    assert "rope_table" in dict(model.named_buffers())
    assert "rope_table" not in model.state_dict()


def test_loss_counts_valid_labels_only() -> None:
    logits = normal((2, 3, 5), name="logits", seed=0)
    labels = torch.tensor([[0, 4, IGNORED_LABEL], [IGNORED_LABEL, 2, 1]])
    chosen = [logits.log_softmax(-1)[b, t, labels[b, t]] for b, t in ((0, 0), (0, 1), (1, 1), (1, 2))]
    torch.testing.assert_close(summed_cross_entropy(logits, labels), -torch.stack(chosen).sum())


# --- initial weights -------------------------------------------------------------------------------------------------


def test_initial_weights_depend_on_seed_and_name() -> None:
    first, same, other = (dict(model_of(SMALL, seed=seed).named_parameters()) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    fingerprints = {(tuple(p.shape), float(p.detach().sum())) for p in first.values()}
    assert len(fingerprints) == len(first)


def test_initial_weights_do_not_depend_on_the_other_layers() -> None:
    shallow, deep = (dict(model_of(msgspec.structs.replace(SMALL, n_layers=n)).named_parameters()) for n in (1, 3))
    assert all(torch.equal(shallow[name], deep[name]) for name in shallow)


def test_initial_weights_have_the_specified_statistics() -> None:
    config = msgspec.structs.replace(SMALL, dim=64, ffn_dim=96)
    model = Transformer(config)
    init_weights(model, seed=0)
    for name, p in model.named_parameters():
        is_norm = name.endswith("norm.weight")
        mean, std = (1.0, config.norm_std) if is_norm else (0.0, config.bias_std if p.ndim == 1 else config.init_std)
        # Five standard errors of the sample mean and of the sample standard deviation: about one miss in 10^6.
        assert abs(float(p.detach().mean()) - mean) < 5 * std / math.sqrt(p.numel()), name
        assert abs(float(p.detach().std()) - std) < 5 * std / math.sqrt(2 * p.numel()), name


def test_initialisation_fills_parameters_and_buffers_of_a_meta_model() -> None:
    with torch.device("meta"):
        model = Transformer(msgspec.structs.replace(SMALL, tied_embeddings=True))
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(math.nan)
    init_weights(model, seed=0)
    assert all(tensor.isfinite().all() for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(model.rope_table, rope_table(SMALL))


def test_a_module_without_a_rule_is_refused() -> None:
    model = Transformer(SMALL)
    model.layers.append(nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match=r"no initialisation rule for layers\.2\.weight of BatchNorm1d: add one to"):
        init_weights(model, seed=0)


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp_size", "accumulation"), [(1, 1), (1, 4), (2, 2), (4, 1), (8, 1), (2, 4)])
def test_ranks_and_micro_batches_partition_the_global_batch(dp_size: int, accumulation: int) -> None:
    batches = Batches(DataConfig(seq_len=16, min_valid_fraction=0.5), vocab_size=61, seed=5)
    shares = [
        pair
        for rank in range(dp_size)
        for pair in batches.micro_batches(3, dp_rank=rank, dp_size=dp_size, accumulation=accumulation)
    ]
    for part, whole in zip(zip(*shares, strict=True), batches.global_batch(3), strict=True):
        assert torch.equal(torch.cat(part), whole)


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
    """A file of consecutive numbers, as bytes and as `.npy`; tokens beyond the vocabulary are folded into it."""
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
    config = OptimizerConfig(warmup_steps=4, final_lr_fraction=0.2)
    factors = [learning_rate_factor(step, config=config, steps=11) for step in range(12)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[7] == pytest.approx(0.6), "half way from 1 to 0.2"
    assert factors[10:] == pytest.approx([0.2, 0.2])
    assert all(before > after for before, after in pairwise(factors[4:11]))


@pytest.mark.parametrize("steps", [1, 5])
def test_learning_rate_is_constant_by_default(steps: int) -> None:
    assert {learning_rate_factor(step, config=OptimizerConfig(), steps=steps) for step in range(steps)} == {1.0}


def test_schedule_scales_every_group() -> None:
    config = OptimizerConfig(lr=0.5, warmup_steps=1)
    optimizer = build_optimizer(Transformer(SMALL), config)
    schedule = build_schedule(optimizer, config, steps=3)
    assert [float(rate) for rate in schedule.get_last_lr()] == [0.25, 0.25]


def test_matrices_decay_and_vectors_do_not() -> None:
    model = Transformer(msgspec.structs.replace(SMALL, tied_embeddings=True))
    frozen = model.layers[0].get_parameter("attention.wq.weight").requires_grad_(False)
    decayed, kept = build_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert all(names[id(p)].endswith(("norm.weight", ".bias")) for p in kept["params"])
    assert all(p.ndim == 2 and p is not frozen for p in decayed["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(names) - 1


def test_groups_hold_tied_weights_once() -> None:
    model = Transformer(msgspec.structs.replace(SMALL, tied_embeddings=True))
    held = [p for group in groups_of(model, weight_decay=0.1) for p in group["params"]]  # type: ignore[attr-defined]
    assert len({id(p) for p in held}) == len(held)


@pytest.mark.parametrize(("max_norm", "factor"), [(0.0, 1.0), (26.0, 1.0), (6.5, 0.5)])
@pytest.mark.parametrize("wrap", [list, iter], ids=["list", "generator"])
def test_clipping(max_norm: float, factor: float, wrap: Callable[[list[nn.Parameter]], list[nn.Parameter]]) -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
    assert float(clip_gradients(wrap(parameters), max_norm=max_norm)) == 13.0
    torch.testing.assert_close(parameters[0].grad, torch.tensor([3.0, 4.0]) * factor, rtol=1e-6, atol=0)
    torch.testing.assert_close(parameters[1].grad, torch.tensor([12.0]) * factor, rtol=1e-6, atol=0)
