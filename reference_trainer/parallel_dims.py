"""Degrees of parallelism, and whether a configuration fits them. Without torch: any process can resolve a mesh."""

from dataclasses import dataclass
from typing import Protocol

from reference_trainer.checks import require
from reference_trainer.config import MeshConfig, TrainerConfig
from reference_trainer.precision import PRECISIONS


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism of a run; the mesh has one dimension for each that is used, and always `dp_shard`."""

    dp_replicate: int
    dp_shard: int
    tp: int
    pp: int = 1
    ep: int = 1
    """Ranks of `dp_shard` over which experts are divided."""
    cp: int = 1
    """Ranks of `dp_shard` that share samples, each with a part of every sequence."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp(self) -> int:
        """Number of ranks that see different tokens."""
        return self.dp_replicate * self.dp_shard

    @property
    def sample_groups(self) -> int:
        """Number of groups of ranks that see different samples."""
        return self.dp // self.cp

    def shard_rank(self, rank: int) -> int:
        """Return the coordinate of a rank in `dp_shard`."""
        return rank // self.tp % self.dp_shard

    def mesh_shape(self) -> dict[str, int]:
        """Return name and size of each dimension of the mesh, outermost first."""
        degrees = {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        return {name: degree for name, degree in degrees.items() if degree > 1 or name == "dp_shard"}

    def expert_mesh_shape(self) -> dict[str, int]:
        """Return name and size of each dimension of the mesh of experts, outermost first."""
        inner = {"expert_shard": self.dp_shard // self.ep, "ep": self.ep}
        outer, last = {"dp_replicate": self.dp_replicate}, {"tp": self.tp}
        return {name: size for name, size in (outer | inner | last).items() if size > 1 or name in inner}

    def context_mesh_shape(self) -> dict[str, int]:
        """Return name and size of each dimension of the mesh in which `cp` ranks share samples, outermost first."""
        return {"samples": self.sample_groups, "cp": self.cp, "tp": self.tp}


def resolve_mesh(mesh: MeshConfig, *, world_size: int) -> ParallelDims:
    """Fit the configured degrees to the number of processes. Raises UsageError where they do not fit."""
    others = mesh.pp * mesh.dp_replicate * mesh.tp
    dp_shard = mesh.dp_shard if mesh.dp_shard != "auto" else max(1, world_size // others)
    dims = ParallelDims(
        pp=mesh.pp, dp_replicate=mesh.dp_replicate, dp_shard=dp_shard, tp=mesh.tp, ep=mesh.ep, cp=mesh.cp
    )
    pipeline = f"pp {dims.pp} x " if dims.pp > 1 else ""
    require(
        dims.world_size == world_size,
        f"mesh {pipeline}dp_replicate {dims.dp_replicate} x dp_shard {mesh.dp_shard} x tp {dims.tp} does not fit the "
        f"number of processes, {world_size}: start {dims.world_size} processes, or change mesh.dp_shard, mesh.tp",
    )
    require(
        dp_shard % mesh.ep == 0,
        f"mesh.dp_shard {dp_shard} is not divisible by mesh.ep {mesh.ep}, which divides experts among its ranks",
    )
    require(
        dp_shard % mesh.cp == 0,
        f"mesh.dp_shard {dp_shard} is not divisible by mesh.cp {mesh.cp}, which divides sequences among its ranks",
    )
    return dims


def check_fits_mesh(config: TrainerConfig, dims: ParallelDims) -> None:
    """Raise UsageError for sizes that this mesh cannot divide, and for options without effect on it."""
    data = config.data
    check_blocks_fit(config.model, tp=dims.tp)
    # A rank has a chunk of either half of each sequence, which balances the load of a causal mask.
    chunks = 2 * dims.cp if dims.cp > 1 else 1
    require(data.seq_len % chunks == 0, f"data.seq_len {data.seq_len} is not divisible by 2 x mesh.cp {dims.cp}")
    shared = f" / mesh.cp {dims.cp}" if dims.cp > 1 else ""
    if config.sequence_parallel:
        require(
            data.seq_len // dims.cp % dims.tp == 0,
            f"data.seq_len {data.seq_len}{shared} is not divisible by mesh.tp {dims.tp}",
        )
    require(
        data.global_batch_size % (dims.sample_groups * config.accumulation) == 0,
        f"data.global_batch_size {data.global_batch_size} is not divisible by data-parallel ranks{shared} x "
        f"accumulation = {dims.sample_groups} x {config.accumulation}",
    )
    require(
        not (1 < dims.ep == dims.dp_shard and PRECISIONS[config.precision].reduce == "float16"),
        f"precision {config.precision} with mesh.ep {dims.ep}, all of dp_shard: torch divides fp16 gradients of a "
        "group of one shard twice (findings/divide_factor_of_one_shard.py); use a smaller mesh.ep, or fp16-mp",
    )
    require(
        dims.dp_shard > 1 or config.gradient_divisor is None or PRECISIONS[config.precision].reduce != "float16",
        f"precision {config.precision} with gradient_divisor {config.gradient_divisor} and mesh.dp_shard 1: torch "
        "divides fp16 gradients of one shard twice (findings/divide_factor_of_one_shard.py); leave it out, or use "
        "fp16-mp",
    )
    _check_float8_shards(config, dims)
    require(
        config.implementation == "fsdp2" or dims.dp_shard > 1,
        "implementation fsdp1 does not shard over mesh.dp_shard 1: use more ranks, or implementation fsdp2",
    )
    require(
        config.gradient_sync != "all-reduce-last" or dims.dp_replicate > 1,
        "gradient_sync all-reduce-last needs replicas (HSDP), whose all-reduce it postpones, but mesh.dp_replicate is "
        f"{dims.dp_replicate}: set mesh.dp_replicate above 1, or use gradient_sync each or last",
    )


def _check_float8_shards(config: TrainerConfig, dims: ParallelDims) -> None:
    """Raise UsageError for weights whose shards torchao would not pad (https://github.com/pytorch/ao/issues/3982)."""
    model = config.model
    rows = {"dim": model.dim, "ffn_dim": model.ffn_dim, "n_kv_heads x head_dim": model.n_kv_heads * model.head_dim}
    uneven = [f"model.{name} {size}" for name, size in rows.items() if size % dims.dp_shard and size % 16 == 0]
    require(
        config.float8 != "tensorwise" or not uneven,
        f"float8 tensorwise: {', '.join(uneven)} cannot be divided evenly among mesh.dp_shard {dims.dp_shard}, and "
        "shards that are gathered in float8 are not padded; use float8 rowwise, or another mesh.dp_shard",
    )


class SizesOfBlocks(Protocol):
    """Sizes of a model that tensor parallelism cuts into equal parts."""

    @property
    def n_heads(self) -> int:
        """Query heads."""

    @property
    def n_kv_heads(self) -> int:
        """Key/value heads."""

    @property
    def ffn_dim(self) -> int:
        """Width of the hidden layer of the feed-forward network."""


def check_blocks_fit(model: SizesOfBlocks, *, tp: int) -> None:
    """Raise UsageError for sizes that the tensor-parallel ranks cannot divide."""
    for name in ("n_heads", "n_kv_heads", "ffn_dim"):
        size = getattr(model, name)
        require(size % tp == 0, f"model.{name} {size} is not divisible by mesh.tp {tp}")
