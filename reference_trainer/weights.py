"""Loading of weights: formats of files, names of parameters, and distribution to shards.

There are three formats: a safetensors file with the full tensor of each parameter under its name in `named_parameters`
(a tied weight once, as the embedding's); safetensors in the names of Hugging Face's Llama, one file or a directory with
an index; and a directory of torch.distributed.checkpoint. Buffers are never loaded, but recomputed.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from reference_trainer.checks import UsageError, require
from reference_trainer.config import ModelConfig, TrainerConfig
from reference_trainer.init_weights import assign, init_buffers
from reference_trainer.model import Transformer
from reference_trainer.progress import LoadPlanner, progress

Format = Literal["safetensors", "hf", "dcp"]
"""Format of a checkpoint: the trainer's own, the transformers library's Llama, or torch.distributed.checkpoint."""

_FLOATING_POINT = ("F64", "F32", "F16", "BF16")
_NAMES_SHOWN = 5
_INDEX = "model.safetensors.index.json"
_DCP_METADATA = ".metadata"
DCP_PREFIX = "model."
"""Prefix of the names of the model's parameters in a training checkpoint, which holds the optimizer's state, too."""


@torch.no_grad()
def load_weights(model: Transformer, *, path: Path | str, broadcast: bool = False) -> Format:
    """Fill a materialised model in place: parameters from a checkpoint, cast to their dtypes, buffers by rule.

    No rank holds more than its shards and one full tensor at a time; with `broadcast`, rank 0 alone reads, holds the
    full model and broadcasts it. Returns the format of the checkpoint. Raises UsageError for a checkpoint that cannot
    be read or does not hold exactly these parameters.
    """
    form: Format = "dcp"
    if is_dcp(path):
        _load_dcp(model, Path(path))
    else:
        with open_checkpoint(path, model) as (form, read):
            if broadcast:
                _broadcast_from_rank0(model, read, title=f"load {path}")
            else:
                for name, parameter in progress(list(model.named_parameters()), title=f"load {path}"):
                    assign(parameter, read(name))
    init_buffers(model)
    return form


def check_checkpoint(config: TrainerConfig) -> None:
    """Raise UsageError, before anything is built, if the configuration names a checkpoint that cannot be loaded."""
    if config.checkpoint is None:
        return
    with torch.device("meta"):
        model = Transformer(config.model)
    if is_dcp(config.checkpoint):
        require(
            config.checkpoint_reader == "each-rank",
            "checkpoint_reader rank0 is for safetensors: a directory of torch.distributed.checkpoint is read by all "
            "ranks, each its shards; use checkpoint_reader each-rank",
        )
        stored_in_dcp(config.checkpoint, model)
        return
    with open_checkpoint(config.checkpoint, model):
        pass


def is_dcp(path: Path | str) -> bool:
    """Return whether a path is a directory of torch.distributed.checkpoint."""
    return Path(path, _DCP_METADATA).is_file()


@contextmanager
def open_checkpoint(path: Path | str, model: Transformer) -> Iterator[tuple[Format, Callable[[str], Tensor]]]:
    """Open a checkpoint; yields its format, and a function that reads a parameter's full tensor in the stored dtype.

    The model, whose parameters the checkpoint must hold, may be sharded, or on the meta device. Raises UsageError if a
    file cannot be read, or names and shapes are not those of the model's parameters.
    """
    with ExitStack() as stack:
        stored: dict[str, Any] = {}  # open files, whose methods have no types
        for file in _safetensors_files(Path(path)):
            opened = stack.enter_context(_open(file))
            stored |= dict.fromkeys(opened.keys(), opened)
        is_hf = _HF_EMBEDDING in stored
        names = _to_trainer_names(stored) if is_hf else {name: name for name in stored}
        if is_hf:
            _check_hf_config(Path(path), model.config)
        shapes = {
            name: _shape(stored[stored_name].get_slice(stored_name), path, name) for name, stored_name in names.items()
        }
        _require_same_parameters(shapes, model.config, path)
        yield ("hf" if is_hf else "safetensors"), lambda name: stored[names[name]].get_tensor(names[name])


def _safetensors_files(path: Path) -> list[Path]:
    """The file itself, or the files of a directory: those that its index names, or `model.safetensors`."""
    if not path.is_dir():
        require(path.is_file(), f"checkpoint {path} is neither a file nor a directory")
        return [path]
    index = path / _INDEX
    if not index.is_file():
        file = path / "model.safetensors"
        require(file.is_file(), f"checkpoint {path} holds none of {_DCP_METADATA}, {_INDEX} and model.safetensors")
        return [file]
    try:
        files = sorted({path / name for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(f"checkpoint {index} is not an index of safetensors files: {error!r}") from None
    for file in files:
        require(file.is_file(), f"checkpoint {path}: {file.name}, which the index names, is missing")
    return files


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UsageError(f"checkpoint {file} cannot be read as safetensors: {error}") from None


def _shape(entry: Any, path: Path | str, name: str) -> list[int]:
    dtype, shape = entry.get_dtype(), entry.get_shape()
    require(dtype in _FLOATING_POINT, f"checkpoint {path}: {name} is {dtype} of shape {shape}, must be floating point")
    return list(shape)


def _require_same_parameters(stored: Mapping[str, list[int]], config: ModelConfig, path: Path | str) -> None:
    with torch.device("meta"):
        shapes = {name: list(parameter.shape) for name, parameter in Transformer(config).named_parameters()}
    missing, superfluous = sorted(shapes.keys() - stored.keys()), sorted(stored.keys() - shapes.keys())
    require(
        not missing and not superfluous,
        f"checkpoint {path} does not hold this model: missing {_shown(missing)}; superfluous {_shown(superfluous)}; "
        "each parameter must be there once, a tied weight as tok_embeddings.weight, and nothing else",
    )
    for name, shape in stored.items():
        require(
            shape == shapes[name], f"checkpoint {path}: {name} has shape {shape}, the model's has shape {shapes[name]}"
        )


def _shown(names: list[str]) -> str:
    """The first of the names, and how many more there are."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more or "none"


def _broadcast_from_rank0(model: Transformer, read: Callable[[str], Tensor], *, title: str) -> None:
    full: dict[str, Any] = {}
    if dist.get_rank() == 0:
        full = {
            name: read(name).to(parameter.dtype)
            for name, parameter in progress(list(model.named_parameters()), title=title)
        }
        if model.config.tied_embeddings:
            full["output.weight"] = full["tok_embeddings.weight"]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)


def stored_in_dcp(path: Path | str, model: Transformer) -> str:
    """Return the prefix of the names of the model's parameters in a directory of torch.distributed.checkpoint.

    Raises UsageError if its index cannot be read, or does not hold the model.
    """
    metadata = read_dcp_metadata(path)
    tensors = {
        name: list(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    prefix = DCP_PREFIX if any(name.startswith(f"{DCP_PREFIX}layers.") for name in tensors) else ""
    stored = {name.removeprefix(prefix): size for name, size in tensors.items() if name.startswith(prefix)}
    if model.config.tied_embeddings:
        stored.pop("output.weight", None)
    _require_same_parameters(stored, model.config, path)
    return prefix


def read_dcp_metadata(path: Path | str) -> Metadata:
    """Read the index of a directory of torch.distributed.checkpoint. Raises UsageError if that is impossible."""
    try:
        return FileSystemReader(path).read_metadata()
    except Exception as error:  # it is a pickle: anything can come of a damaged one
        raise UsageError(f"checkpoint {path}: {_DCP_METADATA} cannot be read: {error!r}") from None


def _load_dcp(model: Transformer, path: Path) -> None:
    prefix = stored_in_dcp(path, model)
    into = {f"{prefix}{name}": parameter.detach() for name, parameter in model.named_parameters()}
    try:
        load(into, checkpoint_id=path, planner=LoadPlanner(title=f"load {path}"), no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise UsageError(f"checkpoint {path} cannot be loaded: {' '.join(str(error).split())[:300]}") from None


# Names and settings of Llama checkpoints as the transformers library writes them. Weights need no permutation: both
# models rotate pairs (x[i], x[i + head_dim/2]), see `model.apply_rope`, and order heads equally. Source:
# https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py

_HF_EMBEDDING = "model.embed_tokens.weight"
_ENDS = {_HF_EMBEDDING: "tok_embeddings.weight", "model.norm.weight": "norm.weight", "lm_head.weight": "output.weight"}
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


def _to_trainer_names(stored: Iterable[str]) -> dict[str, str]:
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


def _check_hf_config(path: Path, config: ModelConfig) -> None:
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
