"""Memory model: bytes of a rank in each phase of a training step, of its state and of its groups.

How a step allocates and frees is in `memory_walk`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from conformance.memory_segment import MemorySegment
from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.memory_walk import Usage, Walk
from conformance.oracles.schedule import group_of
from conformance.oracles.torch_versions import UP_TO_2_13, VersionTraits
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import ParallelDims


def usage_by_phase(segments: Iterable[MemorySegment]) -> dict[str, Usage]:
    """What was measured between marks that are phases: over all micro-batches the largest peak, and the last rest."""
    phases: dict[str, Usage] = {}
    for segment in segments:
        usage = phases.setdefault(segment.mark, Usage())
        usage.peak_bytes = max(usage.peak_bytes, segment.peak_bytes)
        usage.end_bytes = segment.end_bytes
    return phases


def predict(
    config: TrainerConfig,
    dims: ParallelDims,
    shapes: Mapping[str, Sequence[int]],
    profile: Sequence[MemorySegment],
    *,
    traits: VersionTraits = UP_TO_2_13,
    kernels: bool = True,
) -> dict[str, Usage]:
    """Peak and rest of `forward`, `backward`, `clip`, `optimizer` and `idle`, over all micro-batches of a step.

    `shapes` are what FSDP divides, by parameter; `profile` has the segments of all micro-batches; `kernels` says if
    what operators of the CPU allocate for themselves counts, which tensors without memory do not show.
    """
    walk = Walk(config, dims, shapes, traits, kernels=kernels)
    walk.micro_batches(profile)
    walk.after_backward()
    return walk.phases


def state_bytes(config: TrainerConfig, dims: ParallelDims, shapes: Mapping[str, Sequence[int]]) -> int:
    """What is there in all phases: shards with padding, and as much for each moment that the optimizer keeps."""
    moments = {"adamw": 2, "sgd": 0}[config.optimizer.name]
    master = int(getattr(torch, dtype_policy(config.precision).sharded).itemsize)
    shards = sum(-(-rows // dims.dp_shard) * math.prod(rest) for rows, *rest in shapes.values())
    return shards * master * (1 + moments)


def group_bytes(config: TrainerConfig, dims: ParallelDims, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Unsharded parameters of each group, with padding, in the dtype of computation."""
    compute = int(getattr(torch, dtype_policy(config.precision).compute).itemsize)
    whole: dict[str, int] = {}
    for name, (rows, *rest) in shapes.items():
        group, numel = group_of(name, config), -(-rows // dims.dp_shard) * dims.dp_shard * math.prod(rest)
        whole[group] = whole.get(group, 0) + numel * compute
    return whole
