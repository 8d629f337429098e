"""MEM: the memory of each phase matches the memory model of the cell."""

from itertools import pairwise

import torch

from conformance.assertions import compare
from conformance.assertions.fixtures import Measure
from conformance.assertions.memory_bounds import (
    PHASES,
    SCALARS_BYTES,
    balance_losses_bytes,
    bounds_of_ranks,
    compare_phases,
    itemsize_bytes,
    resident_of_stage_bytes,
    simulated_steps,
    simulated_usage,
    sizes_of,
    usage_of,
)
from conformance.experiments.memory import (
    MANY_STEPS,
    Growth,
    StepMemory,
    growth_in_simulation,
    growth_of_stages,
    step_in_simulation,
    step_of_sampled_ranks,
    step_on_ranks,
)
from conformance.experiments.without_fsdp import profile_without_fsdp
from conformance.judge.law import law
from conformance.judge.measurements import measure as report
from conformance.oracles.frozen import trained
from conformance.oracles.memory_model import group_bytes, group_numels, scales_bytes
from conformance.oracles.schedule import kept_after_forward
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from conformance.plan.substrates import SIMULATED, STREAMS

RESHARD_AFTER_FORWARD = (
    "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html#torch.distributed.fsdp.fully_shard"
)
PROFILER = "https://docs.pytorch.org/docs/stable/profiler.html#torch.profiler.profile"
MEMORY_STATS = "https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html"


@law(
    "MEM-1",
    where="(model in (deep, wide, large) or (model = cut and features <= 3 or model = experts) "
    # The memory model knows eager blocks and masters of one dtype; what simulated transfers receive overflows in fp16.
    "and precision not in (bf16-mixed, fp16-mp, fp16-reduce) and compile = false) and implementation = fsdp2",
    own_run=True,
    reference=RESHARD_AFTER_FORWARD,
    substrates=SIMULATED,
)
def test_memory_of_a_simulated_world_matches_the_model(measure: Measure, cell: Cell) -> None:
    """Peak memory of a rank in each phase, and memory held after forward and after the step, MUST match the memory
    model of the cell's groups, activations, gradients and optimizer: between bounds at most 2 % apart. Between steps a
    rank MUST hold its shards, their optimizer state and the model's buffers, and nothing else that was allocated since
    the model was built.

    Wrong if a group is not resharded, a buffer is kept too long, all-gathered too early or never freed, or if a copy of
    parameters or of optimizer state is kept. The first and the last data-parallel rank are judged. In a pipeline it is
    each stage: it needs the activations of the micro-batches whose backward is to come, between the halves of a
    backward the inputs of the second, and receive buffers. Other memory may be a number from each rank, the losses, and
    gradients that torch keeps by a fault that MEM-6 judges.

    Experts on a mesh of their own are a group with fewer shards. Rows that ranks exchange for them are there while they
    are exchanged, and those that an expert has multiplied until its backward; routers choose experts in turns.
    """
    losses = _losses_bytes(cell)
    for where, memory, bounds, resident in simulated_steps(measure, cell):
        compare_phases(usage_of(memory), bounds, where=where, ratio=1.02)
        held = memory.held_before_bytes
        compare.between(held, resident, resident + losses, name="held between steps", detail=where, unit="bytes")
    if cell.activation_checkpointing == "full" and cell.config.mesh.pp == 1:
        require_inputs_of_blocks(measure, cell)


def _losses_bytes(cell: Cell) -> int:
    """Return the bytes of losses, and of a number from each rank for each mesh."""
    meshes = 1 + (cell.config.mesh.ep > 1) + (cell.config.mesh.cp > 1)
    return meshes * cell.world_size * torch.float32.itemsize + balance_losses_bytes(cell.config)


def require_inputs_of_blocks(measure: Measure, cell: Cell) -> None:
    """Require that full activation checkpointing holds of each block its input, and the state of random numbers.

    A block with experts also has a balance loss, in fp32, with the factor of its backward, a double.

    The memory model takes activations from a run without FSDP, which checkpoints as well: too much is on both sides.
    """
    __tracebackhide__ = True
    config, dims, _ = sizes_of(cell)
    (profile,) = measure(profile_without_fsdp, cell)
    activations = {segment.mark: segment.start_bytes for segment in profile}
    block_bytes = activations["after-forward layers.1"] - activations["after-forward layers.0"]
    tokens = config.data.global_batch_size * config.data.seq_len // dims.dp // config.accumulation
    tokens //= dims.tp if config.sequence_parallel else 1
    expected = tokens * config.model.dim * itemsize_bytes(config, "compute") + torch.get_rng_state().nbytes
    expected += torch.float32.itemsize + torch.float64.itemsize if config.model.n_experts else 0
    detail, unit = "the second block", "bytes"
    compare.count(block_bytes, name="kept of a block", expected=expected, detail=detail, unit=unit, kind="memory")


@law(
    "MEM-2",
    where="model = deep and features <= 3 and accumulation = 1 and offload = none and world > 1 "
    "and activation_checkpointing = none and implementation = fsdp2",
    reference=PROFILER,
    substrates=("gloo",),
    memory=True,
)
def test_gloo_allocates_copies_of_full_buffers(measure: Measure, cell: Cell) -> None:
    """Memory that gloo allocates for itself MUST be a copy of the full buffer of an all-gather or a reduce-scatter.

    MEM-3 does not judge this copy: the law bounds the memory that MEM-3 leaves out.
    """
    config, dims, shapes = sizes_of(cell)
    largest = max(group_bytes(config, dims, shapes).values())
    ranks = measure(step_on_ranks, cell)
    gathered, reduced = (
        max(use.peak_bytes for memory in ranks for use in memory.backend if use.operator == operator)
        for operator in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")
    )
    compare.between(gathered, largest, largest + SCALARS_BYTES, name="copy", detail="an all-gather", unit="bytes")
    reduce = max(group_numels(config, dims, trained(shapes, config)).values()) * itemsize_bytes(config, "reduce")
    compare.between(reduced, reduce, reduce + SCALARS_BYTES, name="copy", detail="a reduce-scatter", unit="bytes")


@law(
    "MEM-3",
    where="model = deep and implementation = fsdp2 and world > 1 "
    "and (pp = 1 or dp_shard = 1 or activation_checkpointing = none)",  # else so little is held that bounds are loose
    reference=RESHARD_AFTER_FORWARD,
    substrates=("gloo",),
    memory=True,
)
def test_memory_on_every_rank_matches_the_model(measure: Measure, cell: Cell) -> None:
    """Peak memory in forward and in backward, on each rank of a real world, MUST match the memory model: between bounds
    at most 16 % apart.

    It may exceed the memory model only by buffers that the backend's threads have not released yet. Each process group
    has two threads, each of which may hold the buffer of its last operator: a buffer of the largest group of
    parameters (in forward, where nothing is reduced, in the dtype of computation), and one of tensor parallelism. In a
    pipeline, sends hold their tensors until the schedule waits for them, which may be at the end of the step. A release
    in such a thread is noticed when the memory is used again: in forward and backward at once, in later phases
    not, which are judged in simulation only (MEM-1).
    """
    bounds_by_rank = bounds_of_ranks(measure, cell, in_flight=True)
    for rank, (memory, bounds) in enumerate(zip(measure(step_on_ranks, cell), bounds_by_rank, strict=True)):
        compare_phases(usage_of(memory), bounds, where=f"rank {rank}", ratio=1.16)


@law(
    "MEM-4",
    where="model = deep and mesh = dp4 and reshard != always and skipped = none and implementation = fsdp2",
    gaps=["reshard-modes-combined"],
    reference=RESHARD_AFTER_FORWARD,
    substrates=SIMULATED,
)
def test_reshard_after_forward_keeps_the_groups_of_its_mode(measure: Measure, cell: Cell) -> None:
    """Between forward and backward a reshard mode MUST keep, above `always`, the unsharded parameters of the groups
    that it does not reshard (to k ranks: 1/k of each), and nothing else; `never` keeps all of them.
    """
    config, dims, shapes = sizes_of(cell)
    always = cell.but(reshard="always")
    held, least = (_after_forward_bytes(measure, each) for each in (cell, always))
    sizes = group_bytes(config, dims, shapes)
    if config.reshard == 2:
        expected = sum(size // 2 for size in sizes.values())
    else:
        expected = sum(size for group, size in sizes.items() if kept_after_forward(group, config))
    detail = f"{held} bytes are held after forward, {least} by always"
    name = "kept after forward"
    compare.count(held - least, name=name, expected=expected, detail=detail, unit="bytes", kind="memory")


@law(
    "MEM-5",
    # Later micro-batches hold gradients as well, which MEM-1 judges.
    where="model = deep and reshard in (always, never, default) and features <= 3 and accumulation = 1 "
    "and skipped = none and implementation = fsdp2",
    gaps=["pipelines"],
    reference=RESHARD_AFTER_FORWARD,
    substrates=SIMULATED,
)
def test_memory_is_linear_in_the_layers(measure: Measure, cell: Cell) -> None:
    """Memory held after forward MUST grow with each layer by its activations, and by its unsharded parameters if they
    are kept (slope), less the scales with which float8 weights of the step before were gathered; the memory without
    layers MUST be that of embedding, norm and output (intercept).

    Computed from a model of eight layers and one of four. Wrong if memory of each layer is held once, or the reverse.
    """
    deep, half = cell, cell.but(model="half")
    config, dims, shapes = sizes_of(deep)
    layers, fewer = (each.config.model.n_layers for each in (deep, half))
    held, less = (_after_forward_bytes(measure, each) for each in (deep, half))
    (profile,) = measure(profile_without_fsdp, deep)
    activations = {segment.mark: segment.start_bytes for segment in profile}
    sizes = group_bytes(config, dims, shapes)
    kept = {group: size for group, size in sizes.items() if kept_after_forward(group, config)}
    growth = activations["after-forward layers.2"] - activations["after-forward layers.1"]
    freed = scales_bytes(config, {name: shape for name, shape in shapes.items() if name.startswith("layers.1.")})
    layer_bytes = growth + kept.get("layers.1", 0) - freed
    slope = (held - less) // (layers - fewer)
    detail, unit = f"{held} and {less} bytes", "bytes for each layer"
    compare.count(slope, name="slope", expected=layer_bytes, detail=detail, unit=unit, kind="memory")
    ends = sum(size for group, size in kept.items() if not group.startswith("layers."))
    rest = activations["backward"] - (layers * growth) + ends
    intercept = held - layers * slope
    compare.between(intercept, rest, rest + SCALARS_BYTES, name="intercept", detail="no layers", unit="bytes")


@law(
    "MEM-6",
    where="implementation = fsdp2 and world <= 4 and saved_on = none and compile = false and (model = even and "
    "(features <= 2 and (tp = 1 or optimizer = sgd) or accumulation > 1 and offload = cpu and dropout = 0.0) "
    "or model = experts and ep > 1 and features = 5 "
    "or pp > 1 and model = cut and features = 3 and "  # the plain pipeline is in `smoke`, which has no time for it
    "(pipeline != 1f1b or precision = bf16-mp or offload = cpu or activation_checkpointing = full))",
    reference=RESHARD_AFTER_FORWARD,
    substrates=SIMULATED,
)
def test_memory_does_not_grow_over_steps(measure: Measure, cell: Cell) -> None:
    """Fifty steps MUST leave no memory behind, nor an object of Python for each step, and the 50th MUST have the peaks
    of the second, in every phase.

    In a pipeline each stage is judged, and between steps it MUST hold its shards, their optimizer state, the model's
    buffers, losses, and receive buffers, with every schedule.
    """
    if cell.config.mesh.pp == 1:
        (growth,) = measure(growth_in_simulation, cell)
        _require_no_growth(growth, where="rank 0")
        return
    losses = _losses_bytes(cell)
    for stage, growth in enumerate(measure(growth_of_stages, cell)):
        where, resident = f"rank {stage} of the pipeline", resident_of_stage_bytes(cell, stage)
        _require_no_growth(growth, where=where)
        held = growth.second.held_before_bytes
        compare.between(held, resident, resident + losses, name="held between steps", detail=where, unit="bytes")


def _require_no_growth(growth: Growth, *, where: str) -> None:
    __tracebackhide__ = True
    second, fiftieth = usage_of(growth.second), usage_of(growth.fiftieth)
    for name, usage in (("second", second), ("50th", fiftieth)):
        left, detail = usage["idle"].end_bytes, f"{where}, after zero_grad"
        compare.count(left, name=f"left by the {name} step", expected=0, detail=detail, unit="bytes", kind="memory")
    left = growth.fiftieth.held_before_bytes - growth.second.held_before_bytes
    name, detail = "left by the steps between", f"{where}, after the last"
    compare.count(left, name=name, expected=0, detail=detail, unit="bytes", kind="memory")
    # Caches may get a last entry; what every step leaves is at least one object for each of the steps between.
    name, unit = "objects left by the steps between", "objects"
    compare.between(max(0, growth.objects), 0, MANY_STEPS - 4, name=name, detail=where, unit=unit)
    grown = {phase: fiftieth[phase].peak_bytes - second[phase].peak_bytes for phase in PHASES}
    name, detail, unit = "growth of a peak", f"{where}: {grown}", "bytes in 48 steps"
    compare.count(max(grown.values()), name=name, expected=0, detail=detail, unit=unit, kind="memory")


@law(
    "MEM-7",
    # Columns are put together in other memory when they are gathered: a mode that gathers once more may need more.
    where="model = deep and reshard = default and shard_placement = rows "
    "and (features <= 2 or pp > 1 and dp_shard > 1 and features <= 3 "
    "and pipeline not in (interleaved-zero-bubble, zbv-zero-bubble)) and implementation = fsdp2 and world > 1",
    reference=RESHARD_AFTER_FORWARD,
    substrates=SIMULATED,
)
def test_reshard_modes_are_ordered_by_peak(measure: Measure, cell: Cell) -> None:
    """The peak of a step MUST NOT be lower if more groups are kept: never >= except-last >= default >= always, and in a
    pipeline, whose default keeps all, never >= default >= except-last >= always on each stage.

    MEM-1 implies it, by a model of memory that this law does without.
    """
    between = ("except-last", "default") if cell.config.mesh.pp > 1 else ("default", "except-last")
    modes = ("always", *between, "never")
    peaks = {mode: _peaks_bytes(measure, cell.but(reshard=mode)) for mode in modes}
    above = [(a, b) for a, b in pairwise(modes) if any(x > y for x, y in zip(peaks[a], peaks[b], strict=True))]
    detail = "; ".join(f"{a} {peaks[a]} is above {b} {peaks[b]}" for a, b in above)
    compare.count(len(above), name="modes out of order", expected=0, detail=detail, unit="pairs")
    if max(peaks["never"]) == max(peaks["always"]):
        raise ConformanceFailure(f"never and always have the same peak: {peaks}")


@law(
    "MEM-10",
    where="model = deep and implementation = fsdp2 and features <= 3",
    gaps=["pipelines"],
    reference=MEMORY_STATS,
    since="2.9",
    substrates=STREAMS,
)
def test_memory_requested_from_cuda_matches_the_model(measure: Measure, cell: Cell) -> None:
    """Peak bytes requested from the caching allocator in each phase, and bytes held after forward and after the step,
    MUST match the memory model on each rank: between bounds at most 2 % apart.

    Rounding and reserve of the allocator, and memory of other processes on the device, are reported without bounds.
    cuBLAS's workspaces are there since the warm step. Wrong if a group is not resharded, or a buffer is kept too long:
    the record of the measurement has the allocator's history, `snapshot-rankN.pickle`.
    """
    bounds_by_rank = bounds_of_ranks(measure, cell, on_device=True)
    for rank, (memory, bounds) in enumerate(zip(measure(step_on_ranks, cell), bounds_by_rank, strict=True)):
        compare_phases(usage_of(memory), bounds, where=f"rank {rank}", ratio=1.02)
        for kind, peak in _allocator_peaks(memory).items():
            report(f"{kind} of rank {rank}", peak, kind="memory", unit="bytes")
        report(f"device level of rank {rank}", memory.device_level_bytes, kind="memory", unit="bytes")


def _allocator_peaks(memory: StepMemory) -> dict[str, int]:
    kinds = ("allocated_bytes", "active_bytes", "reserved_bytes")
    return {kind: max(getattr(segment, kind) for segment in memory.segments) for kind in kinds}


def _peaks_bytes(measure: Measure, cell: Cell) -> list[int]:
    """Return the peak of a step on each sampled rank."""
    return [
        max(usage.peak_bytes for usage in usage_of(memory).values()) for memory in measure(step_of_sampled_ranks, cell)
    ]


def _after_forward_bytes(measure: Measure, cell: Cell) -> int:
    return simulated_usage(measure(step_in_simulation, cell))["forward"].end_bytes
