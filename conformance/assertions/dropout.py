"""Masks of dropout in a record, assembled for the global batch, so that oracles can replay them."""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from conformance.oracles.dropout import CALLS_PER_BLOCK, Masks
from conformance.oracles.pipeline import layers_of
from conformance.oracles.skipped import computed_blocks
from conformance.outcomes import ConformanceFailure, Unsupported
from conformance.plan.mesh import Mesh
from conformance.run.record import Record
from reference_trainer.config import TrainerConfig


@lru_cache(maxsize=8)
def recorded_masks(record: Record) -> Masks | None:
    """Return the masks of a run's forward passes and the choices of its routers; None if it has neither.

    Raises Unsupported if masks are not seen, and ConformanceFailure if ranks that hold the same activations drop
    different elements.
    """
    experts = record.config.model.n_experts
    choices = {step: _choices_of_step(record, step) for step in record.steps} if experts else {}
    if not record.cell.dropout:
        return Masks({}, choices) if choices else None
    if not are_masks_seen(record):
        raise Unsupported("masks of dropout are not seen where inductor compiles")
    return Masks({step: _masks_of_step(record, step) for step in record.steps}, choices)


def _choices_of_step(record: Record, step: int) -> list[Tensor]:
    """Return the experts that the router of each block chose for the tokens of the global batch."""
    mesh = Mesh.parse(record.cell.mesh)
    by_coordinate = {
        facts.mesh_coordinate.get("dp_replicate", 0) * mesh.dp_shard + facts.mesh_coordinate["dp_shard"]: facts.rank
        for facts in record.ranks
    }
    chosen = [record.shards_below(f"step{step}/experts/", rank=rank) for _, rank in sorted(by_coordinate.items())]
    blocks, passes = range(record.config.model.n_layers), range(record.config.accumulation)
    return [torch.cat([own[f"{index}/{block}"] for own in chosen for index in passes]) for block in blocks]


def are_masks_seen(record: Record) -> bool:
    """Return whether all masks of a run are recorded; masks that inductor draws are not."""
    return not record.cell.dropout or record.config.compile != "inductor"


MaskKey = tuple[int, int]
"""Micro-batch and layer."""


def masks_of_rank(record: Record, rank: int, step: int, *, phase: str) -> dict[MaskKey, list[Tensor]]:
    """Return a rank's masks of a step, by micro-batch and layer, in the order of the calls in forward.

    They are bool, of shape (samples, seq_len, dim); sequence parallelism shards the sequence. The phase is `forward`,
    or `backward` for recomputation: there may be no mask. Raises ConformanceFailure for another number of masks.
    """
    below = record.shards_below(f"step{step}/dropout/{phase}/", rank=rank)
    keys: dict[MaskKey, list[str]] = {}
    for number, blocks in enumerate(_passes(record, rank, step, phase=phase)):
        # Backward recomputes the last block first, and each from its beginning.
        for place, key in enumerate(blocks if phase == "forward" else reversed(blocks)):
            calls = range(place * CALLS_PER_BLOCK, (place + 1) * CALLS_PER_BLOCK)
            keys[key] = [f"{number}/{call}" for call in calls]
    expected = {key for calls in keys.values() for key in calls}
    if below and below.keys() != expected:
        raise ConformanceFailure(
            f"rank {rank}, step {step}: dropout is called {len(below)} times in {phase}, not {len(expected)} times"
        )
    return {key: [below[call] for call in calls] for key, calls in keys.items()} if below else {}


class MaskPlace(NamedTuple):
    """Place of a mask of dropout in a run."""

    rank: int
    step: int
    micro_batch: int
    layer: int
    call: int
    """Number of the call of dropout in the layer: 0 after attention, 1 after the feed-forward network."""

    def __str__(self) -> str:
        """Return the place in words."""
        return (
            f"call {self.call} of layer {self.layer} in micro-batch {self.micro_batch} of step {self.step} "
            f"on rank {self.rank}"
        )


def repeated_masks(record: Record, steps: Sequence[int]) -> list[tuple[MaskPlace, MaskPlace]]:
    """Return the masks of steps that are equal to that of an earlier place, with the first such place.

    Replicas of activations are one place.
    """
    seen: dict[bytes, MaskPlace] = {}
    repeated = []
    for facts in record.ranks:
        if facts.mesh_coordinate.get("tp", 0) and not record.cell.sequence_parallel:
            continue
        for step in steps:
            for place, mask in _masks_by_place(record, facts.rank, step, phase="forward").items():
                if (first := seen.setdefault(mask.numpy().tobytes(), place)) != place:
                    repeated.append((place, first))
    return repeated


def masks_of_replicas(record: Record, step: int) -> list[tuple[MaskPlace, MaskPlace]]:
    """Return the masks of a step that differ from those of another tensor-parallel rank with the same activations."""
    if record.cell.sequence_parallel:
        return []
    first: dict[tuple[object, ...], tuple[MaskPlace, Tensor]] = {}
    wrong = []
    for facts in record.ranks:
        at = tuple((name, index) for name, index in facts.mesh_coordinate.items() if name != "tp")
        for place, mask in _masks_by_place(record, facts.rank, step, phase="forward").items():
            other, kept = first.setdefault((at, place[1:]), (place, mask))
            if not torch.equal(mask, kept):
                wrong.append((place, other))
    return wrong


def masks_recomputed_differently(record: Record) -> list[MaskPlace]:
    """Return the places whose recomputed masks differ from those of forward."""
    otherwise = []
    recomputes = record.cell.activation_checkpointing != "none"
    for rank, step in itertools.product(range(len(record.ranks)), record.steps):
        forward, backward = (_masks_by_place(record, rank, step, phase=phase) for phase in ("forward", "backward"))
        if len(backward) != len(forward) * recomputes:
            raise ConformanceFailure(f"rank {rank}, step {step}: {len(backward)} masks are recomputed")
        otherwise += [place for place, mask in backward.items() if not torch.equal(mask, forward[place])]
    return otherwise


def _masks_by_place(record: Record, rank: int, step: int, *, phase: str) -> dict[MaskPlace, Tensor]:
    masks = masks_of_rank(record, rank, step, phase=phase)
    return {
        MaskPlace(rank, step, index, layer, call): mask
        for (index, layer), calls in masks.items()
        for call, mask in enumerate(calls)
    }


def _passes(record: Record, rank: int, step: int, *, phase: str) -> list[list[MaskKey]]:
    """Return the blocks of each forward, or each backward, of a rank in their order, as forward computes them."""
    config = record.cell.config
    if config.mesh.pp == 1:
        together = 1 if phase == "forward" else config.passes
        keys = _computed(config, step)
        starts = range(0, config.accumulation, together)
        return [[key for key in keys if start <= key[0] < start + together] for start in starts]
    actions = [a for a in record.ranks[rank].stage_actions if a.step == step and a.action == phase]
    return [[(action.micro_batch, layer) for layer in layers_of(action.stage, config)] for action in actions]


def _computed(config: TrainerConfig, step: int) -> list[MaskKey]:
    """Return micro-batch and layer of all blocks that a step computes, in the order of forward."""
    indices = range(config.accumulation)
    return [(index, layer) for index in indices for layer in computed_blocks(config, index, step=step)]


def _masks_of_step(record: Record, step: int) -> Sequence[Tensor]:
    """Masks of the global batch: samples belong to a data-parallel rank, and within it to a micro-batch."""
    config, mesh = record.cell.config, Mesh.parse(record.cell.mesh)
    masks_by_place: dict[tuple[int, int], dict[MaskKey, list[Tensor]]] = {}
    for facts in record.ranks:
        at = facts.mesh_coordinate
        place = at.get("dp_replicate", 0) * mesh.dp_shard + at["dp_shard"], at.get("tp", 0)
        masks_by_place.setdefault(place, {}).update(masks_of_rank(record, facts.rank, step, phase="forward"))
    keys = list(itertools.product(range(config.accumulation), range(config.model.n_layers)))
    computed = _computed(config, step)
    by_coordinate: dict[int, list[list[Tensor]]] = {}
    for (coordinate, _), masks in sorted(masks_by_place.items(), key=lambda item: item[0]):
        if missing := [key for key in computed if key not in masks]:
            index, layer = missing[0]
            raise ConformanceFailure(
                f"data-parallel rank {coordinate}, step {step}: layer {layer} drops nothing in micro-batch {index}"
            )
        # Oracles never look at the masks of a block that is left out.
        unused = [torch.ones_like(mask) for mask in next(iter(masks.values()), [])]
        by_coordinate.setdefault(coordinate, []).append([mask for key in keys for mask in masks.get(key, unused)])
    coordinate_masks = [_over_tp(ranks, sharded=config.sequence_parallel) for ranks in by_coordinate.values()]
    calls = config.model.n_layers * CALLS_PER_BLOCK
    return [torch.cat([mask for masks in coordinate_masks for mask in masks[call::calls]]) for call in range(calls)]


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
