"""MEM: what is held in each phase is what the cell needs, no more and no less."""

from itertools import pairwise
from typing import Any

import msgspec

from conformance.judge.law import Measure, law
from conformance.laws import compare
from conformance.laws.memory_bounds import PHASES, SCALARS_BYTES, compare_phases, itemsize, parts, phase_bounds, phases
from conformance.oracles.memory_model import Segment, group_bytes
from conformance.oracles.schedule import kept_after_forward
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from conformance.plan.substrates import SIMULATED
from conformance.plan.workload import trainer_config

RESHARD_AFTER_FORWARD = (
    "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html#torch.distributed.fsdp.fully_shard"
)
PROFILER = "https://docs.pytorch.org/docs/stable/profiler.html#torch.profiler.profile"


@law("MEM-1", reference=RESHARD_AFTER_FORWARD, substrates=SIMULATED)
def test_memory_of_a_simulated_world_is_that_of_the_model(measure: Measure, cell: Cell) -> None:
    """The most that a rank holds in each phase, and what is left after forward and after the step, MUST be what the
    cell's groups, activations, gradients and optimizer need: between bounds at most 2 % apart.

    Wrong if a group is not resharded, a buffer is kept too long, gathered too early or never freed.
    """
    (measured,) = measure("memory:step_in_simulation", cell, alone=True)
    compare_phases(phases(measured), phase_bounds(measure, cell), where="rank 0", ratio=1.02)


@law("MEM-2", reference=PROFILER, substrates=("gloo",))
def test_backends_allocate_what_they_are_known_to(measure: Measure, cell: Cell) -> None:
    """What gloo allocates for itself MUST be a copy of the whole buffer of an all-gather or a reduce-scatter.

    It is a term of its own, and not part of what MEM-3 judges.
    """
    config, dims, shapes = parts(cell)
    largest = max(group_bytes(config, dims, shapes).values())
    found = {
        kind: max(u["peak_bytes"] for m in _on_ranks(measure, cell) for u in m["backend"] if u["operator"] == kind)
        for kind in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")
    }
    gathered, reduced = found.values()
    compare.between(gathered, largest, largest + SCALARS_BYTES, name="copy", detail="an all-gather", unit="bytes")
    reduce = largest // itemsize(config, "compute") * itemsize(config, "reduce")
    compare.between(reduced, reduce, reduce + SCALARS_BYTES, name="copy", detail="a reduce-scatter", unit="bytes")


@law("MEM-3", reference=RESHARD_AFTER_FORWARD, substrates=("gloo",))
def test_memory_on_every_rank_is_that_of_the_model(measure: Measure, cell: Cell) -> None:
    """On each rank of a real world the most that is held in forward and in backward MUST be what the cell needs:
    between bounds at most 10 % apart.

    Above what the model says only what the backend's threads have not released yet. Each process group has threads of
    its own, which may hold the buffer of their last operator: one of the largest group of parameters, in forward, where
    nothing is reduced, in the dtype of computation; and one of tensor parallelism. What they release out of sight is
    noticed when the memory is used again: in forward and backward at once, later not, so that the phases after them are
    judged in simulation alone (MEM-1).
    """
    for rank, measured in enumerate(_on_ranks(measure, cell)):
        compare_phases(phases(measured), phase_bounds(measure, cell, in_flight=True), where=f"rank {rank}", ratio=1.10)


@law("MEM-4", reference=RESHARD_AFTER_FORWARD, substrates=SIMULATED)
def test_what_stays_after_forward_is_what_the_mode_keeps(measure: Measure, cell: Cell) -> None:
    """Between forward and backward a reshard mode MUST keep, above `always`, the unsharded parameters of the groups
    that it does not reshard (to k ranks: 1/k of each), and nothing else; `never` keeps all of them.
    """
    config, dims, shapes = parts(cell)
    always = cell.but(reshard="always")
    found, least = (_after_forward(measure, one) for one in (cell, always))
    sizes = group_bytes(config, dims, shapes)
    if config.reshard == 2:
        expected = sum(size // 2 for size in sizes.values())
    else:
        expected = sum(size for group, size in sizes.items() if kept_after_forward(group, config))
    detail = f"{found} bytes are held after forward, {least} by always"
    compare.count(found - least, name="kept after forward", expected=expected, detail=detail, unit="bytes")


@law("MEM-5", reference=RESHARD_AFTER_FORWARD, substrates=SIMULATED)
def test_memory_is_linear_in_the_layers(measure: Measure, cell: Cell) -> None:
    """What is held after forward MUST grow with each layer by its activations, and by its unsharded parameters if they
    are kept; what is left without layers MUST be that of embedding, norm and output: slope and intercept.

    From a model of eight layers and one of four. Wrong if what belongs to each layer is held once, or the reverse.
    """
    deep, half = cell, cell.but(model="half")
    config, dims, shapes = parts(deep)
    layers, fewer = (trainer_config(one).model.n_layers for one in (deep, half))
    found, less = (_after_forward(measure, one) for one in (deep, half))
    (profile,) = measure("memory:without_fsdp", deep, alone=True)
    activations = {s.mark: s.start_bytes for s in msgspec.convert(profile, list[Segment])}
    sizes = group_bytes(config, dims, shapes)
    kept = {group: size for group, size in sizes.items() if kept_after_forward(group, config)}
    of_layer = activations["after-forward layers.2"] - activations["after-forward layers.1"] + kept.get("layers.1", 0)
    slope = (found - less) // (layers - fewer)
    compare.count(
        slope, name="slope", expected=of_layer, detail=f"{found} and {less} bytes", unit="bytes for each layer"
    )
    ends = sum(size for group, size in kept.items() if not group.startswith("layers."))
    rest = activations["backward"] - (layers * (of_layer - kept.get("layers.1", 0))) + ends
    compare.between(
        found - layers * slope, rest, rest + SCALARS_BYTES, name="intercept", detail="no layers", unit="bytes"
    )


@law("MEM-6", reference=RESHARD_AFTER_FORWARD, substrates=SIMULATED)
def test_memory_does_not_grow(measure: Measure, cell: Cell) -> None:
    """A step MUST leave nothing behind, and the 50th step MUST need what the second does, in every phase."""
    (measured,) = measure("memory:growth_in_simulation", cell, alone=True)
    first, last = (phases(measured[name]) for name in ("first", "last"))
    for name, usage in (("second", first), ("50th", last)):
        left = usage["idle"].end_bytes
        compare.count(left, name=f"left by the {name} step", expected=0, detail="after zero_grad", unit="bytes")
    grown = {phase: last[phase].peak_bytes - first[phase].peak_bytes for phase in PHASES}
    compare.count(max(grown.values()), name="growth of a peak", expected=0, detail=str(grown), unit="bytes in 48 steps")


@law("MEM-7", reference=RESHARD_AFTER_FORWARD, substrates=SIMULATED)
def test_modes_are_in_order(measure: Measure, cell: Cell) -> None:
    """The peak of a step MUST NOT be lower if more is kept: never >= except-last >= default >= always."""
    modes = ("always", "default", "except-last", "never")
    peaks = {mode: _peak(measure, cell.but(reshard=mode)) for mode in modes}
    wrong = [f"{a} {peaks[a]} is above {b} {peaks[b]}" for a, b in pairwise(modes) if peaks[a] > peaks[b]]
    compare.count(len(wrong), name="modes out of order", expected=0, detail="; ".join(wrong), unit="pairs")
    if peaks["never"] == peaks["always"]:
        raise ConformanceFailure(f"never and always have the same peak: {peaks}")


def _peak(measure: Measure, cell: Cell) -> int:
    (measured,) = measure("memory:step_in_simulation", cell, alone=True)
    return max(usage.peak_bytes for usage in phases(measured).values())


def _after_forward(measure: Measure, cell: Cell) -> int:
    (measured,) = measure("memory:step_in_simulation", cell, alone=True)
    return phases(measured)["forward"].end_bytes


def _on_ranks(measure: Measure, cell: Cell) -> list[dict[str, Any]]:
    return measure("memory:step_on_ranks", cell)
