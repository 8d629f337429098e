"""Outline of a model: names, shapes and dtypes of its parameters and buffers, without memory."""

from functools import lru_cache

import torch

from reference_trainer.config import ModelConfig
from reference_trainer.model import Transformer


@lru_cache(maxsize=32)
def outline(config: ModelConfig) -> Transformer:
    """Return a model on the meta device; equal configurations share the model, which must not be changed."""
    with torch.device("meta"):
        return Transformer(config)
