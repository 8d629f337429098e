"""Model, compared with a second implementation, and its initial weights."""

import math

import msgspec
import pytest
import torch
from torch import Tensor, nn

from reference_trainer.config import ModelConfig
from reference_trainer.data import IGNORED_LABEL
from reference_trainer.init_weights import init_weights, normal
from reference_trainer.loss import summed_cross_entropy
from reference_trainer.model import Transformer, apply_rope, rope_table

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
    """Compute logits in a second way: complex rotations, one head and one query at a time, explicit softmax."""
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
        q, k, v = (torch.split(linear(f"{name}.{proj}", x), config.head_dim, dim=-1) for proj in ("wq", "wk", "wv"))
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

    def logits_of(sample: Tensor) -> Tensor:
        x = weights["tok_embeddings.weight"][sample]
        for layer in range(config.n_layers):
            x = x + attention(f"layers.{layer}.attention", rms_norm(f"layers.{layer}.attention_norm", x))
            x = x + feed_forward(f"layers.{layer}.feed_forward", rms_norm(f"layers.{layer}.ffn_norm", x))
        return linear("output", rms_norm("norm", x))

    return torch.stack([logits_of(sample) for sample in tokens])


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
    labels, step = TOKENS.roll(-1, dims=1), 1e-6
    torch.autograd.backward(summed_loss_fp64(model, labels))

    @torch.no_grad()
    def loss_after(p: Tensor, change: Tensor) -> float:
        p.add_(change)
        loss = float(summed_loss_fp64(model, labels))
        p.sub_(change)
        return loss

    for name, p in model.named_parameters():
        direction = normal(tuple(p.shape), name=name, seed=1).double()
        slope = (loss_after(p, step * direction) - loss_after(p, -step * direction)) / (2 * step)
        assert p.grad is not None
        assert slope == pytest.approx(float((p.grad * direction).sum()), rel=1e-6, abs=1e-7), name


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
    model.layers["2"] = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match=r"no initialisation rule for layers\.2\.weight of BatchNorm1d: add one to"):
        init_weights(model, seed=0)
