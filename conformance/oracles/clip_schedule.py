"""Schedule of clipping: the reductions of the gradient norm, in their order.

The p-norm of a tensor that is sharded over ranks is the root of a sum over these ranks, the inf-norm a maximum;
replicas hold the same, and nothing is reduced over them. Reducing a single number would suffice. torch reduces the norm
of each parameter: the p-norm of pending p-norms is not among the reductions that DTensor knows to be linear
(`common_reduction_strategy` in torch/distributed/tensor/_ops), so the norms that get_total_norm has stacked are reduced
before they are combined; but see `VersionTraits.norms_reduced_one_by_one`.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.schedule import Event, subgroup
from conformance.oracles.torch_versions import traits_of
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import ParallelDims


def clip_events(parameters: Iterable[str], config: TrainerConfig, dims: ParallelDims) -> list[Event]:
    """Return all collectives of clipping in one step on a rank with these parameters.

    The norm is taken, and reported, even where nothing is clipped. RMSNorms outside of tensor parallelism are on a
    separate mesh, and come second, unless the first parameter is one, in a stage that does not begin with the
    embedding. In a pipeline each rank then gathers the norms of all stages. Norms of one mesh are stacked in the
    largest of their gradients' dtypes, which is that of RMSNorms where these are among them. Experts that are divided
    among ranks are on a mesh of theirs, which comes second.
    """
    names, policy = list(parameters), dtype_policy(config.precision)
    by_mesh = ByMesh.of(names, config, dims)
    dtype = policy.sharded if by_mesh.norms else policy.sharded_norms
    shards, tp = ("dp_shard", dims.dp_shard), ("tp", dims.tp)
    inside = _norm(len(by_mesh.others), (shards, tp), config, dtype)
    outside = _norm(len(by_mesh.norms), (shards,), config, policy.sharded_norms) if by_mesh.norms else []
    expert_groups = [(subgroup(ranks, dims), ranks) for ranks in (dims.dp_shard // dims.ep, dims.ep)]
    outside += _norm(len(by_mesh.experts), [*expert_groups, tp], config, policy.sharded) if by_mesh.experts else []
    stage_norms = [Event("clip", "all_gather", "pp", 1, policy.sharded_norms)] if dims.pp > 1 else []
    return (outside + inside if names[0] in by_mesh.norms else inside + outside) + stage_norms


class ByMesh(NamedTuple):
    """Names of parameters by the mesh of their gradients."""

    others: list[str]
    norms: list[str]
    """Norms outside of tensor parallelism, on the data-parallel dimensions alone."""
    experts: list[str]
    """Experts that are divided among ranks."""

    @classmethod
    def of(cls, names: Iterable[str], config: TrainerConfig, dims: ParallelDims) -> "ByMesh":
        """Return the meshes of parameters."""
        by_mesh = cls([], [], [])
        for name in names:
            is_outside_tp = dims.tp > 1 and not config.norms_in_tp and "norm" in name
            is_expert = dims.ep > 1 and ".experts." in name
            (by_mesh.norms if is_outside_tp else by_mesh.experts if is_expert else by_mesh.others).append(name)
        return by_mesh


def _norm(parameters: int, groups: Sequence[tuple[str, int]], config: TrainerConfig, dtype: str) -> list[Event]:
    """Reductions of a norm over groups, each a name and a number of ranks, one after the other."""
    largest = config.optimizer.norm_order == math.inf
    traits = traits_of(str(torch.__version__))
    one_by_one = not largest and traits.norms_reduced_one_by_one
    numel, op = parameters if one_by_one else 1, "MAX" if largest else "SUM"
    alone = ("dp_shard",) if traits.one_rank_reduces and not largest else ()
    reduced = (group for group, ranks in groups if ranks > 1 or group in alone)
    return [Event("clip", "all_reduce", group, numel, dtype, op) for group in reduced]
