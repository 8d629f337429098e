"""Traffic model: all collectives of one rank in one optimizer step, in every phase.

The collectives of FSDP, tensor and context parallelism, the loss and clipping, each derived from its algorithm.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from conformance.oracles import pipeline
from conformance.oracles.clip_schedule import clip_events
from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.expert_exchange import forward_passes
from conformance.oracles.float8 import gathered_in_float8
from conformance.oracles.frozen import trained
from conformance.oracles.loss_scale import unscale_events
from conformance.oracles.ring_exchange import ring_events
from conformance.oracles.schedule import Event, Shapes, fsdp_events, reduced_numels, shard_numels
from conformance.oracles.tp_schedule import local_shapes, shards, tensor_parallel_events
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import ParallelDims


@dataclass(frozen=True)
class Traffic:
    """Number and bytes of collectives that have phase, group, kind and dtype in common."""

    count: int = 0
    nbytes: int = 0
    """Bytes of this rank's inputs. The bytes that it sends follow from these, kind and group, see `sent_bytes`."""


TrafficByKey = dict[tuple[str, str, str, str], Traffic]
"""Traffic by phase, group, kind and dtype."""


class Sent(Protocol):
    """Collective, predicted (`schedule.Event`) or measured (`instruments.facts.Collective`)."""

    @property
    def phase(self) -> str:
        """Phase of the step."""

    @property
    def group(self) -> str:
        """Ranks that take part."""

    @property
    def kind(self) -> str:
        """Kind of the collective."""

    @property
    def dtype(self) -> str:
        """Dtype on the wire."""

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's input."""


def step_events(
    config: TrainerConfig, dims: ParallelDims, *, tp_rank: int, pp_rank: int = 0, full: Shapes | None = None
) -> list[Event]:
    """Return all collectives of a rank in any step, FSDP's and tensor parallelism's each in its order.

    If what trains changes between steps, `config` is that of one of them, see `frozen.at_step`.
    Of a rank's other coordinates none matters: FSDP pads uneven shards, tensor parallelism gives the last ranks less of
    a dimension that it shards unevenly. Transfers between stages are no collectives, see `pipeline.transfers`, and
    exchanges between ranks with experts follow the routing, see `expert_exchange`. `full` are the shapes of a model
    other than the trainer's.
    """
    full = full or local_shapes(config.model, tp=1, tp_rank=0)
    shapes = shards(full, tp=dims.tp, tp_rank=tp_rank)
    numels = shard_numels(shapes, config, shards=dims.dp_shard)
    return [
        *_sum("data", "int64", dims, over=("dp_replicate", "dp_shard")),  # number of valid tokens
        *_load_events(config, dims, full),
        *_fsdp_events(config, dims, numels, reduced_numels(shapes, config, shards=dims.dp_shard), pp_rank),
        *tensor_parallel_events(config, dims, pp_rank=pp_rank, shapes=full),
        *ring_events(config, dims, attended=_attended(full)),
        *unscale_events(config, dims),
        *clip_events(pipeline.held_by(pp_rank, trained(shapes, config), config), config, dims),
        *_scale_events(config, dims, pp_rank),
        *_sum("idle", "float32", dims, over=("pp", "dp_replicate", "dp_shard")),  # loss to report
    ]


def _attended(full: Shapes) -> int:
    """Return the width of the output of attention, of all heads, which its last product multiplies."""
    return next(shape[1] for name, shape in full.items() if name.endswith("attention.wo.weight"))


def _fsdp_events(
    config: TrainerConfig, dims: ParallelDims, numels: Mapping[str, int], reduced: Mapping[str, int], pp_rank: int
) -> list[Event]:
    if dims.pp == 1:
        return fsdp_events(config, dims, numels, reduced)
    return pipeline.fsdp_events(config, dims, numels, pipeline.order(config, rank=pp_rank))


def add_up(collectives: Iterable[Sent]) -> TrafficByKey:
    """Return number and bytes of collectives by phase, group, kind and dtype."""
    total: TrafficByKey = {}
    for sent in collectives:
        key = (sent.phase, sent.group, sent.kind, sent.dtype)
        before = total.get(key, Traffic())
        total[key] = Traffic(before.count + 1, before.nbytes + sent.nbytes)
    return total


def ranks_in(group: str, dims: ParallelDims) -> int:
    """Return the number of ranks that take part in the collectives of a group, as `schedule.Event.group` names it."""
    if group == "world":
        return dims.world_size
    dimension, _, smaller = group.partition("/")
    return int(smaller or getattr(dims, dimension))


def sent_bytes(kind: str, input_bytes: int, *, ranks: int) -> int:
    """Return the bytes that each rank sends to its neighbour if the ranks are arranged as a ring.

    In each of g-1 steps of an all-gather over g ranks, a rank passes on an input of another rank: (g-1) times its own
    input. A reduce-scatter passes on sums of 1/g of the input: (g-1)/g of it. An all-reduce is a reduce-scatter and an
    all-gather of what that leaves: 2(g-1)/g. An all-to-all sends (g-1)/g of the input, if each rank gets as much of it.
    Sources: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    https://doi.org/10.1016/j.jpdc.2008.09.002; the factors of bus bandwidth in
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, which for an all-gather count the output.
    Raises ValueError for another kind of collective.
    """
    one_way = (ranks - 1) * input_bytes
    match kind:
        case "all_gather":
            return one_way
        case "reduce_scatter" | "all_to_all":
            return -(-one_way // ranks)
        case "all_reduce":
            return -(-2 * one_way // ranks)
        case _:
            raise ValueError(
                f"collective {kind}: only all_gather, reduce_scatter, all_reduce and all_to_all are modelled"
            )


def routed_experts(shapes: Shapes) -> list[int]:
    """Return the number of experts of each block that has some, in a model with parameters of these shapes."""
    return [shape[0] for name, shape in shapes.items() if name.endswith(".router.weight")]


def _load_events(config: TrainerConfig, dims: ParallelDims, full: Shapes) -> list[Event]:
    """Sums of the numbers of tokens by expert over all data, in each block's forward and where it is recomputed."""
    return [
        msgspec.structs.replace(each, numel=experts)
        for phase, passes in forward_passes(config).items()
        for experts in passes * routed_experts(full)
        for each in _sum(phase, "int64", dims, over=("dp_replicate", "dp_shard"))
    ]


def _scale_events(config: TrainerConfig, dims: ParallelDims, pp_rank: int) -> list[Event]:
    """Maximum over shards of the absolute values of each weight that is gathered in float8, all in one reduction."""
    weights = pipeline.held_by(pp_rank, gathered_in_float8(config), config)
    if not weights or dims.dp_shard == 1:
        return []
    dtype = dtype_policy(config.precision).sharded
    return [Event("optimizer", "all_reduce", "dp_shard", len(weights), dtype, "MAX")]


def _sum(phase: str, dtype: str, dims: ParallelDims, *, over: Sequence[str]) -> list[Event]:
    """Sum of one number, over one dimension after the other."""
    return [Event(phase, "all_reduce", name, 1, dtype) for name in over if getattr(dims, name) > 1]
