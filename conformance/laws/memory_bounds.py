"""Bounds on memory by phase, computed from a cell, and comparisons with them."""

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from conformance.judge.law import Measure
from conformance.laws import compare
from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.memory_model import Segment, Usage, group_bytes, predict, state_bytes, usage_by_phase
from conformance.oracles.torch_versions import lifetimes_of
from conformance.oracles.tp_schedule import local_shapes, tensor_parallel_events
from conformance.plan.cells import Cell
from conformance.plan.workload import trainer_config
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import ParallelDims, resolve_mesh

PHASES = ("forward", "backward", "clip", "optimizer")
_BUSY_PHASES = ("forward", "backward")
_FP32_BYTES = 4
SCALARS_BYTES = 128
"""Losses, numbers of tokens and the like: each a tensor of a few bytes."""
_COPIES_OF_A_ROW = 16
"""Of the vocabulary, where ranks have unequal parts of it: in embedding and output, unsharded, gathered, reduced."""


def parts(cell: Cell) -> tuple[TrainerConfig, ParallelDims, dict[str, tuple[int, ...]]]:
    config = trainer_config(cell)
    dims = resolve_mesh(config.mesh, world_size=cell.world_size)
    return config, dims, local_shapes(config.model, tp=dims.tp, tp_rank=0)


def itemsize(config: TrainerConfig, what: str) -> int:
    policy = dtype_policy(config.precision)
    return int(getattr(torch, policy.reduce if what == "reduce" else policy.compute).itemsize)


class Bounds(msgspec.Struct, frozen=True):
    """Of one figure."""

    lower: int
    upper: int


def phase_bounds(
    measure: Measure, cell: Cell, *, in_flight: bool = False, on_device: bool = False
) -> tuple[int, dict[tuple[str, str], Bounds]]:
    """Bytes that are there in all phases; and with them, bounds by phase and `peak` or `rest`.

    `in_flight`: the threads of each process group may hold the buffer of its last operator. `on_device`: activations
    are those of the device's operators.
    """
    config, dims, shapes = parts(cell)
    (profile,) = measure("memory:without_fsdp", cell, alone=True, on_device=on_device)
    lifetimes = lifetimes_of(str(torch.__version__))
    predicted = predict(config, dims, shapes, msgspec.convert(profile, list[Segment]), lifetimes=lifetimes)
    state, largest = state_bytes(config, dims, shapes), max(group_bytes(config, dims, shapes).values())
    reduced = largest // itemsize(config, "compute") * _FP32_BYTES
    held = {"forward": largest, "backward": reduced} if in_flight else {}
    held = {phase: size + _tensor_parallel_buffer_bytes(config, dims, phase) for phase, size in held.items()}
    less = _COPIES_OF_A_ROW * config.model.dim * _FP32_BYTES if in_flight and config.model.vocab_size % dims.tp else 0

    def around(phase: str, value: int) -> Bounds:
        return Bounds(state + value - less, state + value + SCALARS_BYTES + held.get(phase, 0))

    busy = _BUSY_PHASES if in_flight else PHASES
    peaks = {(phase, "peak"): around(phase, predicted[phase].peak_bytes) for phase in busy}
    rests = {
        (phase, "rest"): around(phase, predicted[phase].end_bytes) for phase in ("forward", "idle") if not in_flight
    }
    return state, peaks | rests


def _tensor_parallel_buffer_bytes(config: TrainerConfig, dims: ParallelDims, phase: str) -> int:
    """The largest copy of a whole buffer that gloo makes for a collective over `tp` (MEM-2 says of which kinds)."""
    events = [event for event in tensor_parallel_events(config, dims) if event.phase == phase]
    whole = {"all_gather": dims.tp, "reduce_scatter": 1, "all_reduce": 0}
    return max((event.nbytes * whole[event.kind] for event in events), default=0)


def compare_phases(
    measured: Mapping[str, Usage],
    expected: tuple[int, Mapping[tuple[str, str], Bounds]],
    *,
    where: str,
    ratio: float,
) -> None:
    """Raises ValueError for bounds that are so far apart that they prove little."""
    state, bounds = expected
    for (phase, kind), bound in bounds.items():
        if bound.upper > ratio * bound.lower:
            raise ValueError(f"bounds of {phase} are over a factor of {ratio} apart: {bound}; use a larger model")
        usage = measured[phase]
        value = state + (usage.peak_bytes if kind == "peak" else usage.end_bytes)
        compare.between(
            value, bound.lower, bound.upper, name=f"{kind} of {phase}", detail=where, unit="bytes with the state"
        )


def phases(measured: Mapping[str, Any]) -> dict[str, Usage]:
    return usage_by_phase(msgspec.convert(measured["segments"], list[Segment]))
