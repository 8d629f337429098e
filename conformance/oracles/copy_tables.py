"""Tables of CUDA's kernels for FSDP2's copies: addresses and sizes of all tensors of a group, in device memory.

They are uploaded for one kernel, and free again when it is queued. Each is a list of 8-byte numbers:

    copy-out  4 n + 1 + tiles  of each of n tensors two addresses, the size of its shard and the first of its tiles; the
                               end of all tiles; of each tile its tensor. `split_with_sizes_copy.out`
    copy-in   6 n + 2 + tiles  of each tensor its address, its size, the size of its shard, the number of its tiles and
                               where it begins, in bytes and in tiles; both ends; of each tile its tensor.
                               `_chunk_cat.out`

A tile is 2048 bytes of a shard: 128 threads copy 16 bytes each, once as long as all tiles together do not fill the
device's processors. Shards of a copy-in have the dtype of the reduction.

Source: `pack_vecs`, `get_chunk_cat_metadata` and `split_with_sizes_copy_out_cuda_contiguous_no_cast` in
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/TensorShape.cu
"""

from collections.abc import Iterable

import torch

from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.schedule import Shapes, shardings
from conformance.oracles.torch_versions import VersionTraits
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import ParallelDims

_NUMBER_BYTES = 8
_TILE_BYTES = 128 * 16


def largest_tables_bytes(
    config: TrainerConfig, dims: ParallelDims, shapes: Shapes, *, traits: VersionTraits
) -> dict[str, int]:
    """Return the bytes of the largest table in forward and in backward; there is one at a time."""
    policy = dtype_policy(config.precision)
    compute, reduce = (int(getattr(torch, name).itemsize) for name in (policy.compute, policy.reduce))
    groups: dict[str, list[int]] = {}
    for sharding in shardings(shapes, config, shards=dims.dp_shard).values():
        groups.setdefault(sharding.group, []).append(sharding.shard)
    gathers = dims.dp_shard > 1 or traits.one_rank_gathers
    copy_out = max(4 * len(shards) + 1 + _tiles(shards, compute) for shards in groups.values()) * gathers
    copy_in = max(6 * len(shards) + 2 + _tiles(shards, reduce) for shards in groups.values())
    return {"forward": copy_out * _NUMBER_BYTES, "backward": max(copy_out, copy_in) * _NUMBER_BYTES}


def _tiles(shards: Iterable[int], itemsize_bytes: int) -> int:
    return sum(-(-numel * itemsize_bytes // _TILE_BYTES) for numel in shards)
