"""Checkpoints that runs load: the weights that init=meta would sample, in each format that the trainer reads."""

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from reference_trainer import hf_llama
from reference_trainer.config import ModelConfig, TrainerConfig
from reference_trainer.init_weights import init_weights
from reference_trainer.mixed_precision import torch_dtype
from reference_trainer.model import Transformer
from reference_trainer.precision import PRECISIONS


def write_weights(path: Path, config: TrainerConfig, *, form: str) -> None:
    """Write weights sampled by one process, in the dtype with which the trainer builds the model.

    `form` is a value of the axis `weights`.
    """
    model = Transformer(config.model)
    init_weights(model, seed=config.seed)
    dtype = torch_dtype(PRECISIONS[config.precision].build or "float32")
    tensors = {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}
    match form:
        case "hf":
            _write_hf(path, tensors, config.model)
        case "dcp":
            save(dict(tensors), checkpoint_id=path, no_dist=True)
        case _:
            save_file(tensors, path)


def _write_hf(directory: Path, tensors: dict[str, Tensor], config: ModelConfig) -> None:
    """Write two files, as for a large model, and their index."""
    directory.mkdir(exist_ok=True)  # a run that is saved and resumed writes the same files twice
    names = {name: hf_llama.to_hf_name(name) for name in tensors}
    files = {name: f"model-{1 + index % 2:05}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in sorted(set(files.values())):
        save_file({names[name]: tensors[name] for name in tensors if files[name] == file}, directory / file)
    index = {"metadata": {}, "weight_map": {names[name]: file for name, file in files.items()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = {
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
    }
    (directory / "config.json").write_text(json.dumps(settings))
