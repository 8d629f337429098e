"""Float8: the weights that are multiplied in it, and those of them that are gathered in it."""

from functools import lru_cache

from conformance.oracles.outline import outline
from reference_trainer.config import ModelConfig, TrainerConfig

FLOAT8 = "float8_e4m3fn"
"""Dtype of weights in float8."""
_NUMBERS_OF_A_LOAD = 16
"""Kernels of float8 products load so many numbers of a row at once."""
_HIGH_PRECISION = ("norm", "router", "experts")
"""Ends of names of modules in blocks that are no linear layers, or are several in one."""


def multiplied_in_float8(config: TrainerConfig) -> frozenset[str]:
    """Return the names of the weights whose products are of float8 numbers."""
    return frozenset() if config.float8 == "none" else frozenset(_matrices(config.model))


def gathered_in_float8(config: TrainerConfig) -> dict[str, int]:
    """Return the elements, by name, of the weights that are gathered in float8: those with one scale."""
    return _matrices(config.model) if config.float8 == "tensorwise" else {}


@lru_cache(maxsize=16)
def _matrices(model: ModelConfig) -> dict[str, int]:
    """Return the elements of the matrices of dense layers in blocks whose rows and columns kernels load in whole."""
    return {
        name: weight.numel()
        for name, weight in outline(model).named_parameters()
        if weight.ndim == 2
        and name.startswith("layers.")
        and not any(module.endswith(_HIGH_PRECISION) for module in name.split("."))
        and not any(size % _NUMBERS_OF_A_LOAD for size in weight.shape)
    }
