"""Masks of dropout in a record, put together to those of the global batch, which oracles replay."""

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from conformance.instruments.facts import RankFacts
from conformance.oracles.dropout import CALLS_PER_BLOCK, Masks
from conformance.oracles.pipeline import layers_of
from conformance.outcomes import ConformanceFailure, Unsupported
from conformance.plan.mesh import Mesh
from conformance.run.record import Record


@lru_cache(maxsize=8)
def recorded_masks(record: Record) -> Masks | None:
    """Return the masks of a run's forward passes; None without dropout.

    Raises Unsupported on devices, whose kernel of dropout hides its mask, and ConformanceFailure if ranks that hold the
    same activations drop others.
    """
    if not record.cell.dropout:
        return None
    if record.device_type != "cpu":
        raise Unsupported("dropout on a device is one kernel, whose masks are not recorded")
    return Masks({step: _masks_of_step(record, step) for step in record.steps})


def masks_of_rank(record: Record, rank: int, step: int, *, phase: str) -> list[Tensor]:
    """Return a rank's masks of a step, by micro-batch and in the order of calls in forward.

    They are bool, of shape (samples, seq_len, dim); sequence parallelism shards the sequence. The phase is `forward`,
    or `backward` for what is recomputed: there may be no mask. Raises ConformanceFailure for another number of masks.
    """
    config, below = record.cell.config, record.shards_below(f"step{step}/dropout/{phase}/", rank=rank)
    calls = config.model.n_layers * CALLS_PER_BLOCK
    keys = [f"{index}/{_place(call, calls, phase)}" for index in range(config.accumulation) for call in range(calls)]
    if below and below.keys() != set(keys):
        raise ConformanceFailure(
            f"rank {rank}, step {step}: dropout is called {len(below)} times in {phase}, not {len(keys)} times"
        )
    return [below[key] for key in keys if below]


def _masks_over_stages(record: Record, facts: RankFacts, step: int) -> list[Tensor]:
    """Return the forward masks of the stages of one pipeline, as `masks_of_rank` does of a rank with all layers.

    `facts` are those of any rank of the pipeline.
    """
    config, found = record.cell.config, dict[tuple[int, int], list[Tensor]]()
    for other in record.ranks:
        if other.mesh_coordinate | {"pp": 0} != facts.mesh_coordinate | {"pp": 0}:
            continue
        below = record.shards_below(f"step{step}/dropout/forward/", rank=other.rank)
        forwards = [a for a in other.stage_actions if a.step == step and a.action == "forward"]
        for number, action in enumerate(forwards):
            for place, layer in enumerate(layers_of(action.stage, config)):
                calls = [f"{number}/{place * CALLS_PER_BLOCK + call}" for call in range(CALLS_PER_BLOCK)]
                found[action.micro_batch, layer] = [below[call] for call in calls if call in below]
    keys = [(index, layer) for index in range(config.accumulation) for layer in range(config.model.n_layers)]
    if any(len(found.get(key, [])) != CALLS_PER_BLOCK for key in keys):
        raise ConformanceFailure(f"pipeline of rank {facts.rank}, step {step}: a layer drops nothing in a micro-batch")
    return [mask for key in keys for mask in found[key]]


def _place(call: int, calls: int, phase: str) -> int:
    """Place of a call in its phase: backward recomputes the last block first, and each from its beginning."""
    block, within = divmod(call, CALLS_PER_BLOCK)
    return call if phase == "forward" else calls - CALLS_PER_BLOCK * (block + 1) + within


def _masks_of_step(record: Record, step: int) -> Sequence[Tensor]:
    """Masks of the global batch: samples belong to a data-parallel rank, and within it to a micro-batch."""
    config, mesh = record.cell.config, Mesh.parse(record.cell.mesh)
    of_one_rank = partial(masks_of_rank, phase="forward")
    by_coordinate: dict[int, list[list[Tensor]]] = {}
    for facts in sorted(record.ranks, key=lambda facts: facts.mesh_coordinate.get("tp", 0)):
        if facts.mesh_coordinate.get("pp", 0):
            continue  # the first stage stands for its pipeline
        masks = _masks_over_stages(record, facts, step) if config.mesh.pp > 1 else of_one_rank(record, facts.rank, step)
        if not masks:
            raise ConformanceFailure(f"rank {facts.rank}, step {step}: nothing is dropped")
        at = facts.mesh_coordinate
        coordinate = at.get("dp_replicate", 0) * mesh.dp_shard + at["dp_shard"]
        by_coordinate.setdefault(coordinate, []).append(masks)
    of_coordinates = [
        _over_tp(by_coordinate[coordinate], sharded=config.sequence_parallel) for coordinate in sorted(by_coordinate)
    ]
    calls = config.model.n_layers * CALLS_PER_BLOCK
    return [torch.cat([mask for masks in of_coordinates for mask in masks[call::calls]]) for call in range(calls)]


def _over_tp(ranks: Sequence[Sequence[Tensor]], *, sharded: bool) -> list[Tensor]:
    """Masks of one data-parallel coordinate from those of its tensor-parallel ranks."""
    if sharded:
        return [torch.cat(shards, 1) for shards in zip(*ranks, strict=True)]
    for rank, masks in enumerate(ranks):
        if not all(torch.equal(mask, first) for mask, first in zip(masks, ranks[0], strict=True)):
            raise ConformanceFailure(
                f"tensor-parallel rank {rank} drops other elements of replicated activations than rank 0"
            )
    return list(ranks[0])
