"""Shapes of the model to predict: by name, from a YAML file, or from a `config.json` of Hugging Face.

Hugging Face's Llama and Mistral have the structure of the trainer's model: RMSNorm, grouped-query attention with RoPE,
SwiGLU. Only settings that change a shape are read. RoPE's base and scaling change values of its table, a sliding window
changes which values attention sums: neither changes parameters, nor what fused attention keeps.
Sources: transformers/models/{llama,mistral}/configuration_*.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import asdict

from reference_trainer.checks import UsageError
from reference_trainer.config import ModelConfig
from reference_trainer.strict_yaml import Document, convert, load, override

MODELS = Path(__file__).parent / "models"
_REQUIRED = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")
"""Sizes for which a default would be a guess."""


def model_names() -> list[str]:
    """Return the names of the models whose shapes are shipped."""
    return sorted(file.name.removesuffix(".yaml") for file in MODELS.glob("*.yaml"))


def read_model(model: str, overrides: Sequence[str]) -> ModelConfig:
    """Return the shapes of a model: a name, or the path of a `.yaml` or `config.json` file, with overrides.

    Raises UsageError for any other text, and for shapes that are incomplete or unsupported by the trainer's model.
    """
    document = override(_document(model), overrides)
    missing = [name for name in _REQUIRED if name not in document.data]
    if missing:
        raise document.error("$", f"{', '.join(missing)} missing: write a line such as `{missing[0]}: NUMBER`")
    return convert(document, ModelConfig)


def _document(model: str) -> Document:
    if model in model_names():
        return load(MODELS / f"{model}.yaml")
    path = Path(model)
    match path.suffix:
        case ".yaml" | ".yml":
            return load(path)
        case ".json":
            return _hf_shapes(load(path))  # JSON is YAML
    raise UsageError(
        f"unknown model {model}: choose from {', '.join(model_names())}, or give the path of a .yaml like those in "
        "conformance/sizing/models, or of a config.json of Hugging Face (Llama, Mistral)"
    )


_HF_NAMES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "bias": "attention_bias",
    "tied_embeddings": "tie_word_embeddings",
}
"""Fields of the trainer's `ModelConfig`, with their names in the file."""


class _HfConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a `config.json` that decide on structure and shapes; defaults are those of the classes."""

    architectures: tuple[Literal["LlamaForCausalLM", "MistralForCausalLM"]]
    model_type: Literal["llama", "mistral"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    quantization_config: Any = None
    auto_map: Any = None


def _hf_shapes(document: Document) -> Document:
    """Return the shapes in `document`, the content of a `config.json`, under the trainer's names.

    Raises ConfigError, with the line, for a structure that the trainer's model does not have.
    """
    known = {name: value for name, value in document.data.items() if name in _HfConfig.__struct_fields__}
    stored = convert(replace(document, data=known), _HfConfig)
    for name, problem in _problems(stored):
        raise document.error(f"$.{name}", problem)
    if stored.num_key_value_heads is None:
        stored = msgspec.structs.replace(stored, num_key_value_heads=stored.num_attention_heads)
    lines = {f"$.{ours}": document.lines.get(f"$.{theirs}", 1) for ours, theirs in _HF_NAMES.items()}
    values = asdict(stored)
    return Document(document.path, {ours: values[theirs] for ours, theirs in _HF_NAMES.items()}, {"$": 1} | lines)


def _problems(stored: _HfConfig) -> list[tuple[str, str]]:
    """Return the settings that the trainer's model does not support, each with a message."""
    heads, head_dim = stored.num_attention_heads, stored.head_dim
    conditions = {
        "head_dim": (
            head_dim is not None and head_dim * heads != stored.hidden_size,
            f"head_dim {head_dim}: the trainer's heads have hidden_size {stored.hidden_size} / {heads} elements",
        ),
        "attention_bias": (
            stored.attention_bias != stored.mlp_bias,
            f"attention_bias {stored.attention_bias} with mlp_bias {stored.mlp_bias}: the trainer's blocks have biases "
            "in all linear layers or in none",
        ),
        "num_key_value_heads": (
            stored.num_key_value_heads is None and stored.model_type == "mistral",
            "num_key_value_heads is missing, whose default differs between classes: write the number",
        ),
        "quantization_config": (
            stored.quantization_config is not None,
            "quantized weights cannot be trained: use the config.json of the model before quantization",
        ),
        "auto_map": (
            stored.auto_map is not None,
            "the model has code of its own (auto_map), whose structure is unknown: write its shapes into a .yaml",
        ),
    }
    return [(name, problem) for name, (wrong, problem) in conditions.items() if wrong]
