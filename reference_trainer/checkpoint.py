"""Checkpoints: a safetensors file with the full tensor of each parameter, under its name in `named_parameters`.

Thus a tied weight is stored once, under the name of the embedding, and buffers, which are recomputed, are left out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reference_trainer.config import TrainerConfig, require
from reference_trainer.model import Transformer

_FLOATING_POINT = ("F64", "F32", "F16", "BF16")
_NAMES_SHOWN = 5


@contextmanager
def open_checkpoint(path: Path | str, model: Transformer) -> Iterator[Callable[[str], Tensor]]:
    """A function that reads a parameter's full tensor. The model may be sharded, or on the meta device.

    Raises ValueError if the file cannot be read, or names and shapes are not those of the model's parameters.
    """
    if not Path(path).is_file():
        raise ValueError(f"checkpoint {path} is not a file")
    try:
        file: Any = safe_open(path, framework="pt")  # whose methods have no types
    except SafetensorError as error:
        raise ValueError(f"checkpoint {path} cannot be read as safetensors: {error}") from None
    with file:
        _require_same_parameters(file, model, path)
        yield file.get_tensor


def check_checkpoint(config: TrainerConfig) -> None:
    """Raises ValueError, before anything is built, if the configuration names a checkpoint that cannot be loaded."""
    if config.checkpoint is None:
        return
    with torch.device("meta"):
        model = Transformer(config.model)
    with open_checkpoint(config.checkpoint, model):
        pass


def _require_same_parameters(file: Any, model: Transformer, path: Path | str) -> None:
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - the file is no mapping
    missing, superfluous = sorted(shapes.keys() - stored.keys()), sorted(stored.keys() - shapes.keys())
    require(
        not missing and not superfluous,
        f"checkpoint {path} does not hold this model: missing {_shown(missing)}; superfluous {_shown(superfluous)}; "
        "each parameter must be there once, a tied weight as tok_embeddings.weight, and nothing else",
    )
    for name, entry in stored.items():
        require(
            entry.get_shape() == shapes[name] and entry.get_dtype() in _FLOATING_POINT,
            f"checkpoint {path}: {name} is {entry.get_dtype()} of shape {entry.get_shape()}, the model needs floating "
            f"point of shape {shapes[name]}",
        )


def _shown(names: list[str]) -> str:
    """The first of the names."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more or "none"
