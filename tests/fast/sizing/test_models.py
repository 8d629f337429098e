"""Models of `predict`: shipped shapes, YAML files, and files of Hugging Face whose models have as many parameters."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from conformance.sizing.models import MODELS, model_names, read_model
from conformance.sizing.prediction import Request, prediction
from reference_trainer.model import Transformer

# https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json
LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


@pytest.fixture
def hf_config(tmp_path: Path) -> Callable[..., str]:
    """Write the configuration with changes, of which None takes a key away, and return its path."""

    def write(**changes: Any) -> str:
        file = tmp_path / "config.json"
        file.write_text(json.dumps({k: v for k, v in (LLAMA3_8B | changes).items() if v is not None}, indent=2))
        return str(file)

    return write


def test_every_model_that_is_shipped_is_known() -> None:
    assert model_names() == ["codellama-34b", "llama2-7b", "llama3-70b", "llama3-8b", "llama3.1-405b"]


def test_a_yaml_file(tmp_path: Path) -> None:
    file, shipped = tmp_path / "mine.yaml", (MODELS / "llama3-8b.yaml").read_text()
    file.write_text(shipped)
    assert read_model(str(file), ["n_layers=3"]) == read_model("llama3-8b", ["n_layers=3"])
    file.write_text(shipped + "n_experts: 8\n")
    with pytest.raises(ValueError, match=r"mine.yaml:\d+: unknown field `n_experts`; allowed: vocab_size"):
        read_model(str(file), [])


def test_a_config_of_hugging_face(hf_config: Callable[..., str]) -> None:
    assert read_model(hf_config(), []) == read_model("llama3-8b", [])
    assert read_model(hf_config(), ["n_layers=3"]).n_layers == 3
    without_groups = read_model(hf_config(num_key_value_heads=None, attention_bias=True, mlp_bias=True), [])
    assert (without_groups.n_kv_heads, without_groups.bias) == (32, True)
    tied = prediction(Request(model=hf_config(tie_word_embeddings=True), mesh="dp8"))
    assert tied.parameters == prediction(Request(model="llama3-8b", mesh="dp8")).parameters - 128_256 * 4096


def numel(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("config", "model", "billions"),
    [
        (LlamaConfig(num_hidden_layers=2, attention_bias=True, mlp_bias=True), LlamaForCausalLM, None),
        (LlamaConfig(num_hidden_layers=2, num_key_value_heads=4, tie_word_embeddings=True), LlamaForCausalLM, None),
        # Mistral-7B, which has a sliding window: the defaults of its class
        (MistralConfig(), MistralForCausalLM, 7.24),
    ],
    ids=["biases", "tied", "mistral-7b"],
)
def test_as_many_parameters_as_transformers(config: Any, model: Any, billions: float | None, tmp_path: Path) -> None:
    config.architectures = [model.__name__]
    config.save_pretrained(tmp_path)
    read = read_model(str(tmp_path / "config.json"), [])
    with torch.device("meta"):
        ours, theirs = numel(Transformer(read)), numel(model(config))
    assert ours == theirs
    assert billions in (None, round(theirs / 1e9, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "config.json:10: Invalid enum value 'gpt2'; allowed: llama, mistral"),
        (
            {"architectures": ["MixtralForCausalLM"]},
            "Invalid enum value 'MixtralForCausalLM'; allowed: LlamaForCausalLM",
        ),
        ({"architectures": None}, "Object missing required field `architectures`"),
        ({"intermediate_size": None}, "Object missing required field `intermediate_size`"),
        ({"hidden_size": "big"}, "config.json:7: Expected `int`, got `str`"),
        ({"head_dim": 64}, "head_dim 64: the trainer's heads have hidden_size 4096 / 32 elements"),
        ({"hidden_act": "gelu"}, "Invalid enum value 'gelu'; allowed: silu"),
        ({"attention_bias": True}, "attention_bias True with mlp_bias False: the trainer's blocks have biases in all"),
        ({"num_key_value_heads": 5}, "model.n_heads 32 is not divisible by n_kv_heads 5"),
        ({"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"quantization_config": {"bits": 4}}, "quantized weights cannot be trained"),
        ({"auto_map": {"AutoModel": "mine.Model"}}, "the model has code of its own (auto_map)"),
    ],
)
def test_structures_that_the_trainer_does_not_have(
    changes: dict[str, Any], message: str, hf_config: Callable[..., str]
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_model(hf_config(**changes), [])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.toml", "", "or give the path of a .yaml like those in conformance/sizing/models, or of a config.json"),
        ("absent.yaml", None, "absent.yaml:1: cannot be read: No such file or directory"),
        ("short.yaml", "dim: 64\nn_layers: 2\n", "short.yaml:1: vocab_size, n_heads, n_kv_heads, ffn_dim missing"),
        ("other.yaml", "dim: 64\nlayers: 2\n", "missing"),
        ("empty.json", "", "the top level must be a mapping"),
        ("broken.json", '{"model_type": ', "broken.json:1: "),
    ],
)
def test_files_that_are_no_models(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_model(str(file), [])
