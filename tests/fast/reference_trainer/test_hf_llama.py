"""Checkpoints of the transformers library: the trainer computes the same as `LlamaForCausalLM`."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from reference_trainer.config import ModelConfig
from reference_trainer.init_weights import init_weights
from reference_trainer.model import Transformer
from reference_trainer.weights import load_weights

MODEL = ModelConfig(
    vocab_size=61, dim=32, n_layers=2, n_heads=8, n_kv_heads=2, ffn_dim=48, max_seq_len=64, rope_theta=500.0
)
WITH_BIAS_TIED = ModelConfig(
    vocab_size=61, dim=32, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=48, max_seq_len=64, bias=True,
    tied_embeddings=True,
)  # fmt: skip


def written(directory: Path, config: ModelConfig, *, max_shard_size: str) -> LlamaForCausalLM:
    """Save a model of the transformers library with random weights, biases included."""
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            attention_bias=config.bias,
            mlp_bias=config.bias,
            tie_word_embeddings=config.tied_embeddings,
        )
    )
    for parameter in theirs.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape))
    theirs.save_pretrained(directory, max_shard_size=max_shard_size)
    return theirs


@pytest.mark.parametrize("config", [MODEL, WITH_BIAS_TIED], ids=["grouped-query", "bias and tied"])
@pytest.mark.parametrize("max_shard_size", ["1GB", "10KB"])
def test_logits_are_those_of_transformers(config: ModelConfig, max_shard_size: str, tmp_path: Path) -> None:
    """Logits agree at every position: another pairing of RoPE's dimensions, or order of heads, would change them."""
    theirs = written(tmp_path, config, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "10KB")
    ours = Transformer(config)
    load_weights(ours, path=tmp_path)
    tokens = torch.randint(config.vocab_size, (3, config.max_seq_len), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, actual = theirs(tokens).logits, ours(tokens)
    # Rounding of fp32: some 20 products of lengths up to 64 in a row, see docs/tolerances.md.
    assert float((actual - expected).norm() / expected.norm()) < 20 * 8 * 2.0**-24


def test_a_single_file_is_loaded(tmp_path: Path) -> None:
    theirs = written(tmp_path, MODEL, max_shard_size="1GB")
    (tmp_path / "config.json").unlink()
    ours = Transformer(MODEL)
    load_weights(ours, path=tmp_path / "model.safetensors")
    expected = theirs.get_parameter("model.layers.1.self_attn.k_proj.weight")
    assert torch.equal(ours.get_parameter("layers.1.attention.wk.weight"), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 4}, "the weights are for n_heads 4, model.n_heads is 8"),
        ({"rms_norm_eps": 1e-6}, "the weights are for norm_eps 1e-06, model.norm_eps is 1e-05"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "the weights are for rope_theta 10000.0, model.rope_theta is 500"),
        ({"rope_scaling": {"rope_type": "llama3"}, "rope_parameters": None}, "RoPE of type llama3 is not implemented"),
        ({"hidden_act": "gelu"}, "activation gelu is not implemented"),
    ],
)
def test_settings_that_the_weights_do_not_show_are_compared(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    written(tmp_path, MODEL, max_shard_size="1GB")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ValueError, match=message):
        load_weights(Transformer(MODEL), path=tmp_path)


def test_a_missing_file_of_several_is_named(tmp_path: Path) -> None:
    written(tmp_path, MODEL, max_shard_size="10KB")
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-\d+.safetensors, which the index names, is missing"):
        load_weights(Transformer(MODEL), path=tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", "no json", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match="is not an index of safetensors files"):
        load_weights(Transformer(MODEL), path=tmp_path)


def test_a_truncated_file_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    written(tmp_path, MODEL, max_shard_size="1GB")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    model = Transformer(MODEL)
    init_weights(model, seed=0)
    before = model.norm.weight.clone()
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        load_weights(model, path=tmp_path)
    assert torch.equal(model.norm.weight, before)
