"""Initialisation: the distribution of each parameter, bounds on samples from it, and the memory of building."""

import math

import torch

from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.outline import outline
from conformance.oracles.reference import initial_model
from reference_trainer.config import ModelConfig, TrainerConfig
from reference_trainer.precision import PRECISIONS

_X = 20.0
"""Exponent of improbability: a tensor of the right distribution exceeds a bound with probability e**-20 = 2e-9."""


def specified(config: ModelConfig, name: str) -> tuple[float, float]:
    """Return mean and standard deviation of a parameter's initial elements."""
    if "norm" in name:
        return 1.0, config.norm_std
    return 0.0, config.bias_std if name.endswith(".bias") else config.init_std


def initial_weights(config: TrainerConfig) -> dict[str, torch.Tensor]:
    """Return the weights of one process with which a run begins, by name, in the dtypes in which they are sharded.

    A model that is built in bf16 keeps them rounded to bf16, even if it is cast to fp32 later.
    """
    policy, built = dtype_policy(config.precision), PRECISIONS[config.precision].build
    weights = {}
    for name, parameter in initial_model(config).named_parameters():
        stored = getattr(torch, policy.sharded_norms if "norm" in name else policy.sharded)
        sampled = parameter.detach()
        weights[name] = (sampled if built is None else sampled.to(getattr(torch, built))).to(stored)
    return weights


def mean_bound(numel: int) -> float:
    """Return the bound on the absolute mean of `numel` standard-normal samples: the Gaussian tail, exp(-n t^2 / 2)."""
    return math.sqrt(2.0 * _X / numel)


def spread_bounds(numel: int) -> tuple[float, float]:
    """Return lower and upper bound of the mean square of `numel` standard-normal samples.

    Laurent and Massart, "Adaptive estimation of a quadratic functional by model selection", Annals of Statistics 28(5),
    2000, lemma 1: a chi-square of n degrees of freedom is above n + 2 sqrt(n x) + 2 x, or below n - 2 sqrt(n x), each
    with probability at most exp(-x).
    """
    share = _X / numel
    return max(0.0, 1.0 - 2.0 * math.sqrt(share)), 1.0 + 2.0 * math.sqrt(share) + 2.0 * share


def building_memory(config: TrainerConfig, held_bytes: int, *, on_device: bool) -> tuple[int, int]:
    """Return lower and upper bound, in bytes, of the peak memory of a rank while it builds the model.

    `held_bytes` (shards, buffers) are left at the end. Full parameters are sampled on the host: with `on_device`, where
    the memory of the device is measured, none need be there. Parameters are in fp32, and no dimension is
    tensor-parallel except with `meta` and `checkpoint`: memory that gloo sends in the background is released out of the
    profiler's sight.
    """
    model = outline(config.model)
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    largest, full = max(sizes.values()), sum(sizes.values())
    blocks = [sum(parameter.nbytes for parameter in block.parameters()) for block in model.blocks.values()]
    group = max(*blocks, full - sum(blocks))
    table = model.rope_table.nbytes
    computed = max(largest, _ROPE_TEMPORARIES * table) + _SCALARS_BYTES
    match config.init:
        case "meta":  # one full parameter is sampled at a time
            return held_bytes + (0 if on_device else largest), held_bytes + computed
        case "checkpoint":  # which need not be copied if it is read from a mapped file
            return held_bytes, held_bytes + computed
        case "layerwise":
            return max(blocks), held_bytes + group + computed
        case "full":  # FSDP makes a group's shards before it releases the full parameters
            return full, full + table + max(computed, math.ceil(group * held_bytes / full))


_ROPE_TEMPORARIES = 6
"""Temporaries of the RoPE table, in sizes of the table: angles, cosines, sines, and both stacked, in fp64, and the
stack in fp32, 48 bytes for each angle, of which the table has 8."""
_SCALARS_BYTES = 64
"""Size of factors and other tensors of no dimension."""
