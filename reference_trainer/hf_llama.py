"""Names and settings of Llama checkpoints as the transformers library writes them.

Weights need no permutation: both models rotate pairs (x[i], x[i + head_dim/2]), see `model.apply_rope`, and order heads
equally. Source: https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from reference_trainer.checks import UsageError, require
from reference_trainer.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
_ENDS = {EMBEDDING: "tok_embeddings.weight", "model.norm.weight": "norm.weight", "lm_head.weight": "output.weight"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_IN_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
_RECOMPUTED = ".rotary_emb.inv_freq"
"""End of the name of a buffer in files of old versions."""


def to_trainer_names(stored: Iterable[str]) -> dict[str, str]:
    """Map the trainer's name of each parameter to its name in the file; a name without counterpart stays as it is."""
    return {_to_trainer_name(name): name for name in stored if not name.endswith(_RECOMPUTED)}


def _to_trainer_name(name: str) -> str:
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        return _ENDS.get(name, name)
    return f"layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def to_hf_name(name: str) -> str:
    """Return the name in a file of a parameter of the trainer."""
    for theirs, ours in _ENDS.items():
        if ours == name:
            return theirs
    layers, index, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    (hf_module,) = (theirs for theirs, ours in _IN_LAYER.items() if ours == module)
    return f"model.{layers}.{index}.{hf_module}.{kind}"


def check_config(path: Path, config: ModelConfig) -> None:
    """Compare settings that the weights do not show with the `config.json` next to them, if there is one.

    Raises UsageError for settings that are not the model's, or that the trainer does not implement.
    """
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return
    try:
        stored = json.loads(file.read_bytes())
        rope = stored.get("rope_parameters") or stored.get("rope_scaling") or {}
    except (ValueError, AttributeError) as error:
        raise UsageError(f"{file} is not a configuration of a model: {error}") from None
    facts = {
        "n_heads": stored.get("num_attention_heads"),
        "n_kv_heads": stored.get("num_key_value_heads"),
        "rope_theta": rope.get("rope_theta", stored.get("rope_theta")),
        "norm_eps": stored.get("rms_norm_eps"),
        "head_dim": stored.get("head_dim"),
    }
    for name, value in facts.items():
        ours = getattr(config, name)
        require(value is None or value == ours, f"{file}: the weights are for {name} {value}, model.{name} is {ours}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    require(kind == "default", f"{file}: RoPE of type {kind} is not implemented, only the default")
    activation = stored.get("hidden_act", "silu")
    require(activation == "silu", f"{file}: activation {activation} is not implemented, only silu")
