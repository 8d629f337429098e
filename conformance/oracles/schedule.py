"""Schedule model: which collectives FSDP2 issues in one optimizer step, in which order, of which size.

Sources: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_state.py (unshard in pre-forward and
pre-backward, one group prefetched in backward, reduce-scatter in post-backward); the public contract is in the
docstrings of `fully_shard` and `FSDPModule`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import msgspec

from conformance.engine.cells import Cell, Mesh


class Event(msgspec.Struct, frozen=True):
    """One collective of one rank; `numel` is its input's."""

    phase: str
    kind: Literal["all_gather", "reduce_scatter", "all_reduce"]
    group: str
    numel: int
    dtype: str


@dataclass(frozen=True)
class GroupSize:
    """Parameters of one FSDP group on one rank, after tensor parallelism."""

    shard_numel: int
    """Elements of a rank's shard with padding: dimension 0 is split into equal parts, rounded up."""
    shards: int


def group_sizes(
    local_shapes: Mapping[str, Sequence[int]], owners: Mapping[str, str], *, shards: int
) -> list[GroupSize]:
    """Sizes of the groups in forward order (embedding, blocks, norm and output).

    `local_shapes` are the shapes that FSDP divides, by parameter name; `owners` name the group of each.
    """
    order = list(dict.fromkeys(_forward_group(owners[name]) for name in local_shapes))
    numel = dict.fromkeys(order, 0)
    for name, shape in local_shapes.items():
        rows, *rest = shape
        numel[_forward_group(owners[name])] += -(-rows // shards) * prod(rest)
    return [GroupSize(numel[group], shards) for group in order]


def _forward_group(owner: str) -> str:
    """Norm and output are sharded in one call and form one group."""
    return "norm+output" if owner in ("norm", "output") else owner


def fsdp_events(cell: Cell, groups: Sequence[GroupSize]) -> list[Event]:
    """All collectives over `dp_shard` and `dp_replicate` of one optimizer step's forward and backward phases.

    At world size 1 per shard group FSDP2 issues no collectives (torch >= 2.9).
    """
    mesh = Mesh.parse(cell.mesh)
    return [event for _ in range(cell.accumulation) for event in _micro_batch(cell, mesh, groups)]


def _micro_batch(cell: Cell, mesh: Mesh, groups: Sequence[GroupSize]) -> list[Event]:
    compute, reduce = ("bfloat16", "float32") if cell.precision == "bf16-mp" else ("float32", "float32")
    resharded = [reshards_after_forward(cell.reshard, last=i == len(groups) - 1) for i in range(len(groups))]

    def gather(phase: str, i: int) -> list[Event]:
        group = groups[i]
        return [Event(phase, "all_gather", "dp_shard", group.shard_numel, compute)] if group.shards > 1 else []

    def reduce_gradients(i: int) -> list[Event]:
        group, events = groups[i], []
        if group.shards > 1:
            padded = group.shard_numel * group.shards
            events.append(Event("backward", "reduce_scatter", "dp_shard", padded, reduce))
        if mesh.dp_replicate > 1:
            events.append(Event("backward", "all_reduce", "dp_replicate", group.shard_numel, reduce))
        return events

    events = [event for i in range(len(groups)) for event in gather("forward", i)]
    last = len(groups) - 1
    events += gather("backward", last) if resharded[last] else []
    for i in range(last, -1, -1):
        # Entering the backward of a group, the next one is gathered ahead; leaving it, its gradients are reduced.
        events += gather("backward", i - 1) if i > 0 and resharded[i - 1] else []
        events += reduce_gradients(i)
    return events


def reshards_after_forward(reshard: str, *, last: bool) -> bool:
    """Whether a group is freed after forward; `default` keeps the last one, which backward needs at once."""
    return {"always": True, "never": False, "default": not last}[reshard]
