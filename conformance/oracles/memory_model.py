"""Memory model: bytes that a rank holds in each phase of a training step, in its state and in its groups.

`memory_walk` has the allocations and releases of a step, buffer by buffer.
"""

from collections.abc import Iterable, Sequence

import torch

from conformance.memory_segment import MemorySegment
from conformance.oracles.dtype_policy import dtype_policy, optimizer_state
from conformance.oracles.float8 import gathered_in_float8
from conformance.oracles.frozen import at_step, trained
from conformance.oracles.memory_walk import Usage, Walk, sums
from conformance.oracles.schedule import Shapes, shardings
from conformance.oracles.torch_versions import UP_TO_2_14, VersionTraits
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import ParallelDims

MEASURED_STEP = 1
"""Step whose memory experiments measure and the model predicts: the first leaves optimizer state and streams."""


def usage_by_phase(segments: Iterable[MemorySegment]) -> dict[str, Usage]:
    """Return the memory of each phase from segments whose marks are phases.

    A phase that occurs in several micro-batches has the largest of its peaks, and the last of its ends.
    """
    phases: dict[str, Usage] = {}
    for segment in segments:
        usage = phases.setdefault(segment.mark, Usage())
        usage.peak_bytes = max(usage.peak_bytes, segment.peak_bytes)
        usage.end_bytes = segment.end_bytes
    return phases


def predict(
    config: TrainerConfig,
    dims: ParallelDims,
    shapes: Shapes,
    profile: Sequence[MemorySegment],
    *,
    traits: VersionTraits = UP_TO_2_14,
    shard_rank: int = 0,
    kernels: bool = True,
    device_only: bool = False,
) -> dict[str, Usage]:
    """Predict the memory of `forward`, `backward`, `clip`, `optimizer` and `idle`, over all micro-batches of a step.

    `profile` has the segments of all micro-batches without FSDP; `shard_rank` is the rank's coordinate in `dp_shard`;
    `kernels` includes temporaries of the CPU's operators, which tensors without memory do not show; `device_only`
    leaves out offloaded gradients and the optimizer's memory, which are not on the device.
    """
    config = at_step(config, MEASURED_STEP)
    walk = Walk(config, dims, shapes, traits, shard_rank=shard_rank, kernels=kernels, device_only=device_only)
    walk.micro_batches(profile)
    walk.after_backward()
    return walk.phases


def state_bytes(config: TrainerConfig, dims: ParallelDims, shapes: Shapes) -> int:
    """Return the bytes held in all phases: shards with padding, and as much of trained ones for each moment."""
    return parameter_bytes(config, dims, shapes) + optimizer_bytes(config, dims, shapes)


def resident_bytes(config: TrainerConfig, dims: ParallelDims, shapes: Shapes, *, shard_rank: int = 0) -> int:
    """Return the bytes of tensors that a rank holds between steps.

    They are its state, of which only the parameters are padded, AdamW's counter of each parameter, and the model's
    table of rotations, both in fp32; and the scales of weights that are gathered in float8, twice: unsharded weights
    keep those with which they were gathered last.
    """
    counters = len(trained(shapes, config)) if config.optimizer.name == "adamw" else 0
    rotations = config.model.max_seq_len * config.model.head_dim  # a cosine and a sine for each pair of elements
    padding = len(optimizer_state(config.optimizer)) * _padding_bytes(config, dims, trained(shapes, config), shard_rank)
    numbers = torch.float32.itemsize * (counters + rotations)
    return state_bytes(config, dims, shapes) - padding + numbers + 2 * scales_bytes(config, shapes)


def scales_bytes(config: TrainerConfig, shapes: Shapes) -> int:
    """Return the bytes of the scales of a rank's weights that are gathered in float8, in fp32."""
    return torch.float32.itemsize * len(gathered_in_float8(config).keys() & shapes.keys())


def optimizer_bytes(config: TrainerConfig, dims: ParallelDims, shapes: Shapes) -> int:
    """Return the bytes of the optimizer's moments, each as large as the sharded parameters that train."""
    return len(optimizer_state(config.optimizer)) * parameter_bytes(config, dims, trained(shapes, config))


def parameter_bytes(config: TrainerConfig, dims: ParallelDims, shapes: Shapes) -> int:
    """Return the bytes of a rank's sharded parameters, with padding."""
    sharded = shardings(shapes, config, shards=dims.dp_shard).values()
    return _master_bytes(config) * sum(sharding.shard for sharding in sharded)


def _padding_bytes(config: TrainerConfig, dims: ParallelDims, shapes: Shapes, shard_rank: int) -> int:
    """Return the bytes of padding of a rank's sharded parameters; the first rank has none."""
    sharded = shardings(shapes, config, shards=dims.dp_shard).values()
    return _master_bytes(config) * sum(sharding.shard - sharding.own(shard_rank) for sharding in sharded)


def _master_bytes(config: TrainerConfig) -> int:
    """Return the bytes of a number in the dtype of sharded parameters."""
    return int(getattr(torch, dtype_policy(config.precision).sharded).itemsize)


def group_bytes(config: TrainerConfig, dims: ParallelDims, shapes: Shapes) -> dict[str, int]:
    """Return the bytes of each group's unsharded parameters, with padding, in the dtype of computation or in float8."""
    compute = int(getattr(torch, dtype_policy(config.precision).compute).itemsize)
    sharded = shardings(shapes, config, shards=dims.dp_shard).values()
    return sums((sharding.group, sharding.gathered_bytes(compute)) for sharding in sharded)


def group_numels(config: TrainerConfig, dims: ParallelDims, shapes: Shapes) -> dict[str, int]:
    """Return the elements of each group's unsharded parameters, with padding."""
    return sums((each.group, each.padded) for each in shardings(shapes, config, shards=dims.dp_shard).values())
