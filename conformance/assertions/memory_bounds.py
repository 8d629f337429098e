"""Bounds on memory by phase, computed from a cell, and comparisons with them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from conformance.assertions import compare
from conformance.assertions.fixtures import Measure
from conformance.experiments.memory import StepMemory, step_of_sampled_ranks
from conformance.experiments.without_fsdp import (
    profile_context_without_fsdp,
    profile_stages_without_fsdp,
    profile_without_fsdp,
)
from conformance.memory_segment import MemorySegment
from conformance.oracles import pipeline
from conformance.oracles.copy_tables import largest_tables_bytes
from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.memory_model import (
    group_bytes,
    group_numels,
    predict,
    resident_bytes,
    scales_bytes,
    state_bytes,
    usage_by_phase,
)
from conformance.oracles.memory_walk import Usage
from conformance.oracles.plain_optimizer import chosen_on_device
from conformance.oracles.torch_versions import traits_of
from conformance.oracles.tp_schedule import local_shapes, tensor_parallel_events
from conformance.outcomes import Unsupported
from conformance.plan.cells import Cell
from conformance.run.experiment import sampled_ranks
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import ParallelDims, resolve_mesh

PHASES = ("forward", "backward", "clip", "optimizer")
_BUSY_PHASES = ("forward", "backward")
_FP32_BYTES = 4
SCALARS_BYTES = 128
"""Upper bound on the bytes of losses, numbers of tokens and other tensors of a few bytes."""
GLOO_THREADS = 2
"""Threads that run the operators of one process group, in turns: `ProcessGroupGloo::Options::threads`.

A thread that has run an operator notifies the waiting callers, and releases its tensors when it is scheduled again
(`ProcessGroupGloo::runLoop` in torch/csrc/distributed/c10d/ProcessGroupGloo.cpp). A busy machine may stop both threads
there; a third operator needs one of them."""
_COPIES_OF_A_ROW = 16
"""Number of copies of a row of the vocabulary by which ranks differ if their shards of it are unequal.

Copies are in embedding and output, unsharded, gathered and reduced."""


class Bounds(msgspec.Struct, frozen=True):
    """Lower and upper bound of one metric, in bytes."""

    lower: int
    upper: int


class PhaseBounds(msgspec.Struct, frozen=True):
    """Bounds on the memory of a step."""

    state_bytes: int
    """Bytes held in all phases, which the bounds include."""
    by_phase: dict[tuple[str, str], Bounds]
    """Bounds by name of the phase, and `peak` or `rest` (held at the end of the phase)."""


class SimulatedStep(NamedTuple):
    """Memory of a simulated step of one rank, with its bounds."""

    where: str
    memory: StepMemory
    bounds: PhaseBounds
    resident_bytes: int
    """Bytes that the rank must hold between steps."""


def sizes_of(
    cell: Cell, *, stage: int = 0, tp_rank: int = 0
) -> tuple[TrainerConfig, ParallelDims, dict[str, tuple[int, ...]]]:
    """Return the configuration of a cell, its degrees of parallelism, and the shapes that FSDP shards, by parameter.

    Shapes are those of a tensor-parallel rank; in a pipeline, of the parameters of the rank `stage`.
    """
    config = cell.config
    dims = resolve_mesh(config.mesh, world_size=cell.world_size)
    shapes = local_shapes(config.model, tp=dims.tp, tp_rank=tp_rank)
    return config, dims, pipeline.held_by(stage, shapes, config)


def itemsize_bytes(config: TrainerConfig, what: str) -> int:
    """Return the bytes of a number in the dtype of computation or of reductions; `what` is `compute` or `reduce`."""
    policy = dtype_policy(config.precision)
    return int(getattr(torch, policy.reduce if what == "reduce" else policy.compute).itemsize)


def bounds_of_ranks(
    measure: Measure,
    cell: Cell,
    *,
    ranks: Sequence[int] | None = None,
    in_flight: bool = False,
    on_device: bool = False,
) -> list[PhaseBounds]:
    """Return the bounds on memory of each phase of a step, of some ranks of the cell (default: all).

    In a pipeline they are those of a rank of its stage. With `in_flight`, each of the `GLOO_THREADS` of a process group
    may hold the buffer of its last operator, and sends hold their tensors. With `on_device`, activations are those of
    the device's operators, FSDP's copies need no temporaries but may have a table (`oracles.copy_tables`), and the
    optimizer is the one that torch chooses there: its temporaries have the size of all shards of a rank.

    Raises Unsupported for a pipeline of a torch whose buffers are not modelled, and for one shard that torch gathers.
    """
    stages, cp, traits = cell.config.mesh.pp, cell.config.mesh.cp, traits_of(str(torch.__version__))
    if traits.one_rank_gathers and cell.config.mesh.dp_shard == 1 and not in_flight:
        raise Unsupported(f"the memory model does not know that torch {torch.__version__} gathers on one rank")
    if cp > 1:
        profiles = measure(profile_context_without_fsdp, cell, on_device=on_device)
    elif stages == 1:
        profiles = measure(profile_without_fsdp, cell, on_device=on_device)
    elif traits.stages_pool_buffers:
        raise Unsupported(f"the memory model does not know when torch {torch.__version__} holds buffers of transfers")
    else:
        (profiles,) = measure(profile_stages_without_fsdp, cell, on_device=on_device)
    return [
        _bounds(
            cell,
            profiles[rank // cell.config.mesh.tp % cp if cp > 1 else rank * stages // cell.world_size],
            rank,
            in_flight=in_flight,
            on_device=on_device,
        )
        for rank in (range(cell.world_size) if ranks is None else ranks)
    ]


def _bounds(
    cell: Cell, profile: Sequence[MemorySegment], rank: int, *, in_flight: bool, on_device: bool
) -> PhaseBounds:
    stage = rank * cell.config.mesh.pp // cell.world_size
    # On the host they are those of the first tensor-parallel rank, which are the largest.
    config, dims, shapes = sizes_of(cell, stage=stage, tp_rank=rank % cell.config.mesh.tp if on_device else 0)
    traits = traits_of(str(torch.__version__))
    if on_device:
        config = chosen_on_device(config)
    shard_rank = dims.shard_rank(rank)
    predicted = predict(config, dims, shapes, profile, traits=traits, shard_rank=shard_rank, kernels=not on_device)
    tables = largest_tables_bytes(config, dims, shapes, traits=traits) if on_device else {}
    state, largest = state_bytes(config, dims, shapes), max(group_bytes(config, dims, shapes).values())
    reduced = max(group_numels(config, dims, shapes).values()) * _FP32_BYTES
    gathers = dims.dp_shard > 1 or traits.one_rank_gathers
    reduces = dims.dp > 1 or traits.one_rank_reduces
    buffers = {"forward": largest * gathers, "backward": reduced * reduces} if in_flight else {}
    held = {
        phase: GLOO_THREADS * (size + _tensor_parallel_buffer_bytes(config, dims, phase))
        + pipeline.sent_numel(config, dims, rank=stage) * itemsize_bytes(config, "compute")
        for phase, size in buffers.items()
    }
    less = _COPIES_OF_A_ROW * config.model.dim * _FP32_BYTES if in_flight and config.model.vocab_size % dims.tp else 0
    less += balance_losses_bytes(config) + scales_bytes(config, shapes)  # of the step before, which forward frees

    def around(phase: str, value: int) -> Bounds:
        return Bounds(state + value - less, state + value + SCALARS_BYTES + held.get(phase, 0))

    def around_peak(phase: str) -> Bounds:
        bounds = around(phase, predicted[phase].peak_bytes)
        return msgspec.structs.replace(bounds, upper=bounds.upper + tables.get(phase, 0))

    busy = _BUSY_PHASES if in_flight else ("evaluate", *PHASES)
    peaks = {(phase, "peak"): around_peak(phase) for phase in busy if phase in predicted}
    rests = {
        (phase, "rest"): around(phase, predicted[phase].end_bytes) for phase in ("forward", "idle") if not in_flight
    }
    return PhaseBounds(state, peaks | rests)


def balance_losses_bytes(config: TrainerConfig) -> int:
    """Return the bytes of the balance losses, one of each block, that a model with experts holds until it runs again.

    They are numbers in fp32, the dtype of routers.
    """
    return config.model.n_layers * _FP32_BYTES if config.model.n_experts else 0


def simulated_steps(measure: Measure, cell: Cell) -> list[SimulatedStep]:
    """Return the simulated steps of the first and the last rank, or of the first rank of each stage of a pipeline.

    Raises Unsupported as `bounds_of_ranks` does.
    """
    ranks = sampled_ranks(cell.config, cell.world_size)
    bounds = bounds_of_ranks(measure, cell, ranks=ranks)
    steps = measure(step_of_sampled_ranks, cell)
    if cell.config.mesh.pp == 1:
        config, dims, shapes = sizes_of(cell)
        names = ["first rank", "last rank"]
        resident = [resident_bytes(config, dims, shapes, shard_rank=dims.shard_rank(rank)) for rank in ranks]
    else:
        stages = range(cell.config.mesh.pp)
        names = [f"rank {stage} of the pipeline" for stage in stages]
        resident = [resident_of_stage_bytes(cell, stage) + _kept_gradients_bytes(cell, stage) for stage in stages]
    return [SimulatedStep(*step) for step in zip(names, steps, bounds, resident, strict=False)]


def resident_of_stage_bytes(cell: Cell, stage: int) -> int:
    """Return the bytes that a rank of a pipeline must hold between steps: its state, and its receive buffers.

    See `VersionTraits.stages_pool_buffers` for the buffers.
    """
    config, dims, shapes = sizes_of(cell, stage=stage)
    pools = traits_of(str(torch.__version__)).stages_pool_buffers
    received = 0 if pools else pipeline.received_numel(config, dims, rank=stage)
    return resident_bytes(config, dims, shapes) + received * itemsize_bytes(config, "compute")


def _kept_gradients_bytes(cell: Cell, stage: int) -> int:
    if not traits_of(str(torch.__version__)).halves_keep_gradients:
        return 0
    config, dims, _ = sizes_of(cell, stage=stage)
    return pipeline.kept_gradients_numel(config, dims, rank=stage) * itemsize_bytes(config, "compute")


def _tensor_parallel_buffer_bytes(config: TrainerConfig, dims: ParallelDims, phase: str) -> int:
    """Return the bytes of the largest copy of a full buffer that gloo makes for a collective over `tp`, see MEM-2."""
    events = [event for event in tensor_parallel_events(config, dims) if event.phase == phase]
    copies = {"all_gather": dims.tp, "reduce_scatter": 1, "all_reduce": 0}
    return max((event.nbytes * copies[event.kind] for event in events), default=0)


def compare_phases(measured: Mapping[str, Usage], expected: PhaseBounds, *, where: str, ratio: float) -> None:
    """Compare the memory of each phase with its bounds.

    Raises ValueError for bounds that are further apart than a factor of `ratio`, which would prove little.
    """
    __tracebackhide__ = True
    for (phase, kind), bounds in expected.by_phase.items():
        if bounds.upper > ratio * bounds.lower:
            raise ValueError(f"bounds of {phase} are more than a factor of {ratio} apart: {bounds}; use a larger model")
        usage = measured[phase]
        value = expected.state_bytes + (usage.peak_bytes if kind == "peak" else usage.end_bytes)
        name = f"{kind} of {phase}"
        compare.between(value, bounds.lower, bounds.upper, name=name, detail=where, unit="bytes with the state")


def usage_of(memory: StepMemory) -> dict[str, Usage]:
    """Return peak and rest of each phase of a measured step."""
    return usage_by_phase(memory.segments)


def simulated_usage(steps: Sequence[StepMemory]) -> dict[str, Usage]:
    """Return peak and rest of each phase of a step that one process has simulated."""
    (memory,) = steps
    return usage_of(memory)
