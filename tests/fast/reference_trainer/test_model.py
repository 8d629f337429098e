"""Model and its initial weights; `test_hf_llama` compares its logits with those of transformers."""

import math

import msgspec
import pytest
import torch
from torch import nn

from reference_trainer.config import ModelConfig
from reference_trainer.data import IGNORED_LABEL
from reference_trainer.init_weights import init_weights, normal
from reference_trainer.loss import summed_cross_entropy
from reference_trainer.model import Transformer, apply_rope, rope_table

SMALL = ModelConfig(
    vocab_size=13, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=24, max_seq_len=8, bias=True,
    init_std=0.3, bias_std=0.1, norm_std=0.2,
)  # fmt: skip


def model_of(config: ModelConfig, *, seed: int = 0) -> Transformer:
    model = Transformer(config)
    init_weights(model, seed=seed)
    return model.double()


# --- model -----------------------------------------------------------------------------------------------------------


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
