"""Loading of weights from files, and of checkpoints of the transformers library, whose logits the trainer has."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import LlamaConfig, LlamaForCausalLM

from reference_trainer.config import DataConfig, ModelConfig, TrainerConfig
from reference_trainer.init_weights import init_weights
from reference_trainer.model import Transformer, rope_table
from reference_trainer.weights import check_checkpoint, load_weights

TIED = ModelConfig(
    vocab_size=13, dim=16, n_layers=1, ffn_dim=24, max_seq_len=8, bias=True, bias_std=0.1, norm_std=0.2,
    tied_embeddings=True,
)  # fmt: skip
UNTIED = msgspec.structs.replace(TIED, tied_embeddings=False)


def weights(config: ModelConfig) -> dict[str, Tensor]:
    model = Transformer(config)
    init_weights(model, seed=3)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def empty_model(config: ModelConfig) -> Transformer:
    model = Transformer(config)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(torch.nan)
    return model


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_loaded_and_buffers_recomputed(config: ModelConfig, stored: torch.dtype, tmp_path: Path) -> None:
    expected = {name: tensor.to(stored) for name, tensor in weights(config).items()}
    save_file(expected, tmp_path / "weights")
    model = empty_model(config)
    load_weights(model, path=tmp_path / "weights")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name].float()), name
    assert torch.equal(model.rope_table, rope_table(config))
    assert (model.output.weight is model.tok_embeddings.weight) == config.tied_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm.weight": None}, "missing norm.weight; superfluous none"),
        ({"output.weight": torch.ones(13, 16)}, "missing none; superfluous output.weight; each parameter must be"),
        ({"rope_table": torch.ones(2, 8, 2)}, "superfluous rope_table;"),
        ({f"extra{i}": torch.ones(1) for i in range(7)}, "superfluous extra0, .* extra4 and 2 more"),
        ({"norm.weight": torch.ones(17)}, r"norm.weight has shape \[17\], the model's has shape \[16\]"),
        ({"norm.weight": torch.ones(16, dtype=torch.int8)}, r"norm.weight is I8 of shape \[16\], must be floating"),
    ],
    ids=["missing", "tied twice", "buffer", "many", "shape", "dtype"],
)
def test_a_file_of_another_model_is_refused(changes: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    tensors = {**weights(TIED), **changes}
    path = tmp_path / "weights"
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(ValueError, match=f"checkpoint {path}.*{message}"):
        load_weights(empty_model(TIED), path=path)
    with pytest.raises(ValueError, match=message):
        check_checkpoint(TrainerConfig(model=TIED, data=DataConfig(seq_len=8), init="checkpoint", checkpoint=str(path)))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ValueError, match="text cannot be read as safetensors: "):
        load_weights(empty_model(TIED), path=tmp_path / "text")
    with pytest.raises(ValueError, match=r"checkpoint .*none is neither a file nor a directory"):
        load_weights(empty_model(TIED), path=tmp_path / "none")
    with pytest.raises(ValueError, match=r"holds none of .metadata, model.safetensors.index.json and model"):
        load_weights(empty_model(TIED), path=tmp_path)


def test_a_directory_of_torch_distributed_checkpoint_is_loaded(tmp_path: Path) -> None:
    save(dict(weights(TIED)), checkpoint_id=tmp_path / "dcp", no_dist=True)
    model = empty_model(TIED)
    load_weights(model, path=tmp_path / "dcp")
    for name, expected in weights(TIED).items():
        assert torch.equal(model.get_parameter(name), expected), name
    assert torch.equal(model.rope_table, rope_table(TIED))


def test_a_directory_of_torch_distributed_checkpoint_must_hold_the_model(tmp_path: Path) -> None:
    path, without_norm = tmp_path / "dcp", weights(TIED)
    del without_norm["norm.weight"]
    save(dict(without_norm), checkpoint_id=path, no_dist=True)
    with pytest.raises(ValueError, match=r"does not hold this model: missing norm.weight"):
        load_weights(empty_model(TIED), path=path)
    (path / ".metadata").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r".metadata cannot be read"):
        load_weights(empty_model(TIED), path=path)


# Checkpoints of transformers


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
    load_weights(ours, path=tmp_path / "model.safetensors" if max_shard_size == "1GB" else tmp_path)
    tokens = torch.randint(config.vocab_size, (3, config.max_seq_len), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, actual = theirs(tokens).logits, ours(tokens)
    # Rounding of fp32: some 20 products of lengths up to 64 in a row, see docs/tolerances.md.
    assert float((actual - expected).norm() / expected.norm()) < 20 * 8 * 2.0**-24


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
    model = empty_model(MODEL)
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        load_weights(model, path=tmp_path)
    assert model.norm.weight.isnan().all()
