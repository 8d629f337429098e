"""Sizes in a `config.json` of Hugging Face, by the architecture that it names.

Only settings that change a shape are read. RoPE's base and scaling, windows of attention and the activation function
change neither parameters nor what fused kernels keep. Nothing is imported of transformers; tests compare with it.
Sources: transformers/models/FAMILY/{configuration,modeling}_*.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from reference_trainer.strict_yaml import Document, allowed, convert

_TRAINABLE = ("fp8", "mxfp4")
"""Formats in which models are published whose trained weights have more bits."""


class _Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that decide on structure and shapes."""

    vocab_size: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    intermediate_size_mlp: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    tie_word_embeddings: bool | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    moe_layers: list[int] | None = None
    mlp_only_layers: list[int] | None = None
    decoder_sparse_step: int | None = None
    interleave_moe_layer_step: int | None = None
    first_k_dense_replace: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None


_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
}
_OPTIONAL = {"head_dim": "head_dim", "tied_embeddings": "tie_word_embeddings"}
_LATENTS = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
}
_ATTENTION_BIAS = {"attention_bias": ("wq", "wk", "wv", "wo")}
_AROUND = ("post_attention_norm", "post_ffn_norm")
_OF_HEADS = ("q_norm", "k_norm")


@dataclass(frozen=True)
class _Family:
    """Structure of an architecture: names of `Decoder`, and the settings in which their values stand."""

    norms: tuple[str, ...] = ()
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _ATTENTION_BIAS)
    """Modules with a bias, by the setting that says so."""
    biased: tuple[str, ...] = ()
    """Modules that always have a bias."""
    sizes: dict[str, str] = field(default_factory=dict)
    """Sizes with another setting than `_SIZES` has."""
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Settings whose product is a size of `Experts`."""
    latents: bool = False
    sinks: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of the class for settings that published files leave out."""
    adopted_code: bool = False
    """True if files bring code with this structure, which transformers has adopted."""


def _experts(ffn_dim: str, *shared: str) -> dict[str, tuple[str, ...]]:
    sizes = {"number": ("num_local_experts",), "active": ("num_experts_per_tok",), "ffn_dim": (ffn_dim,)}
    return sizes | ({"shared_ffn_dim": shared} if shared else {})


_ALIASES = {"num_experts": "num_local_experts", "n_routed_experts": "num_local_experts"}
"""Names of one setting: transformers has written some families with two of them."""
_LLAMA = _Family(biases=_ATTENTION_BIAS | {"mlp_bias": ("w1", "w2", "w3")})
_FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _Family(biases={}),
    "MixtralForCausalLM": _Family(biases={}, experts=_experts("intermediate_size")),
    "Qwen2ForCausalLM": _Family(biases={}, biased=("wq", "wk", "wv")),
    "Qwen3ForCausalLM": _Family(norms=_OF_HEADS, defaults={"head_dim": 128}),
    "Qwen3MoeForCausalLM": _Family(norms=_OF_HEADS, experts=_experts("moe_intermediate_size")),
    "GemmaForCausalLM": _Family(defaults={"head_dim": 256, "tie_word_embeddings": True}),
    "Gemma2ForCausalLM": _Family(norms=_AROUND, defaults={"head_dim": 256, "tie_word_embeddings": True}),
    "Gemma3ForCausalLM": _Family(
        norms=(*_AROUND, *_OF_HEADS),
        defaults={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
        },
    ),
    "GptOssForCausalLM": _Family(
        biased=("router", "experts"),
        experts=_experts("intermediate_size"),
        sinks=True,
        defaults={"attention_bias": True, "head_dim": 64},
    ),
    "Llama4ForCausalLM": _Family(
        sizes={"ffn_dim": "intermediate_size_mlp"},
        experts=_experts("intermediate_size", "intermediate_size"),
        defaults={"head_dim": 128},
    ),
    "DeepseekV3ForCausalLM": _Family(
        biases={"attention_bias": ("wq_a", "wkv_a", "wo")},
        experts=_experts("moe_intermediate_size", "n_shared_experts", "moe_intermediate_size"),
        latents=True,
        adopted_code=True,
    ),
}
_DECODERS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
}
"""Architectures whose decoder stands in `text_config`, beside encoders of other media."""
ARCHITECTURES = (*_FAMILIES, *_DECODERS)
"""Architectures that are read."""
_NOT_COUNTED = {
    "vision_config": "the encoder of images (vision_config)",
    "num_nextn_predict_layers": "layers that predict further tokens (num_nextn_predict_layers)",
}
"""Parts that no size of a decoder has, by the setting that announces them."""


def decoder_sizes(document: Document) -> Document:
    """Return the sizes in the content of a `config.json`, under the names of `Decoder`.

    Raises ConfigError, with the line, for an architecture that is not known, and for sizes that are missing.
    """
    name = _architecture(document)
    family = _FAMILIES[_DECODERS.get(name, name)]
    _check_weights(document, family)
    text = _section(document, "text_config") if name in _DECODERS else document
    known = {key: value for key, value in text.data.items() if key in _Settings.__struct_fields__}
    stored = msgspec.structs.asdict(convert(replace(text, data=known), _Settings))
    settings = dict(family.defaults)
    settings |= {_ALIASES.get(key, key): value for key, value in stored.items() if value is not None}
    if family is _LLAMA and "num_attention_heads" in settings:
        settings.setdefault("num_key_value_heads", settings["num_attention_heads"])
    names = _SIZES | family.sizes | (_LATENTS if family.latents else {})
    for setting in {name for names in family.experts.values() for name in names} | set(names.values()):
        if setting not in settings and setting != "q_lora_rank":
            raise text.error("$", f"{setting} is missing, whose default differs between classes: write the number")
    lines = {f"$.{ours}": text.lines.get(f"$.{theirs}", 1) for ours, theirs in (names | _OPTIONAL).items()}
    left_out = [left for setting, left in _NOT_COUNTED.items() if document.data.get(setting)]
    return Document(document.path, _sizes(family, settings) | {"not_counted": left_out}, {"$": 1} | lines)


def _architecture(document: Document) -> str:
    """Return the architecture of the file. Raises ConfigError unless it is a known one."""
    given = document.data.get("architectures")
    name = given[0] if isinstance(given, list) and len(given) == 1 else given
    if name not in ARCHITECTURES:
        problem = f"architectures {given}: a structure that is not known{allowed(str(name), ARCHITECTURES)}"
        raise document.error("$.architectures", f"{problem}; or write the sizes into a .yaml")
    return str(name)


def _check_weights(document: Document, family: _Family) -> None:
    """Raise ConfigError for weights that cannot be trained, and for code that can be anything."""
    quantized = document.data.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
    if quantized is not None and method not in _TRAINABLE:
        problem = "quantized weights cannot be trained: use the config.json of the model before quantization"
        raise document.error("$.quantization_config", f"{method}: {problem}")
    if document.data.get("auto_map") is not None and not family.adopted_code:
        problem = "the model has code of its own (auto_map), whose structure is unknown: write its sizes into a .yaml"
        raise document.error("$.auto_map", problem)


def _section(document: Document, name: str) -> Document:
    data, prefix = document.data.get(name), f"$.{name}"
    if not isinstance(data, dict):
        raise document.error("$", f"{name} is missing, in which this architecture has its decoder")
    inside = {path: line for path, line in document.lines.items() if path.startswith(prefix)}
    return Document(document.path, data, {f"${path.removeprefix(prefix)}": line for path, line in inside.items()})


def _sizes(family: _Family, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Decoder`."""
    biased = [modules for setting, modules in family.biases.items() if settings.get(setting)]
    sizes: dict[str, Any] = {
        **{ours: settings[theirs] for ours, theirs in (_SIZES | family.sizes).items()},
        **{ours: settings[theirs] for ours, theirs in _OPTIONAL.items() if theirs in settings},
        "norms": list(family.norms),
        "biases": [module for modules in (family.biased, *biased) for module in modules],
        "sinks": family.sinks,
    }
    if family.latents:
        sizes["latents"] = {ours: settings.get(theirs, 0) for ours, theirs in _LATENTS.items()}
    if family.experts:
        numbers = {ours: math.prod(settings[each] for each in theirs) for ours, theirs in family.experts.items()}
        sizes["experts"] = numbers | {"dense_layers": _dense_layers(settings)}
    return sizes


def _dense_layers(settings: Mapping[str, Any]) -> list[int]:
    """Return the blocks without experts: those before the first, those in a list, and those between steps."""
    layers = range(settings["num_hidden_layers"])
    step = settings.get("decoder_sparse_step") or settings.get("interleave_moe_layer_step") or 1
    sparse = set(settings.get("moe_layers") or [layer for layer in layers if (layer + 1) % step == 0])
    sparse -= {*settings.get("mlp_only_layers", []), *range(settings.get("first_k_dense_replace", 0))}
    return [layer for layer in layers if layer not in sparse]
