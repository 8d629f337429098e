"""FSDP1 beside FSDP2: the same numbers, and how much memory each of them needs for these."""

from collections.abc import Mapping
from typing import Any

import msgspec

from conformance.judge.law import Measure, Run, law
from conformance.judge.measurements import measure as report
from conformance.laws import compare
from conformance.laws.steps import compare_steps, replayed_parameters
from conformance.oracles import tolerance
from conformance.oracles.emulation import emulated_step
from conformance.oracles.fsdp1_memory import predict_fsdp1
from conformance.oracles.memory_model import Segment, predict
from conformance.oracles.tp_schedule import local_shapes
from conformance.plan.cells import Cell
from conformance.plan.substrates import CUDA, SIMULATED
from conformance.plan.workload import trainer_config
from conformance.run.record import Record
from reference_trainer.parallel_dims import resolve_mesh

FSDP1 = "https://docs.pytorch.org/docs/stable/fsdp.html#torch.distributed.fsdp.FullyShardedDataParallel"
FSDP1_AND_FSDP2 = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"

_PHASES = ("forward", "backward")
_SCALARS_BYTES = 128
"""Losses, numbers of tokens and the like: each a tensor of a few bytes."""


@law("STREAM-3", reference=FSDP1)
def test_fsdp1_and_fsdp2_compute_the_same(run: Run, cell: Cell) -> None:
    """From the same weights FSDP1 and FSDP2 MUST compute the same gradients, but for the order of sums and for what one
    of them rounds and the other does not; and FSDP1 MUST take each step as one process does that rounds alike, as is
    asked of FSDP2.

    What they need for it can be compared only then.
    """
    older, newer = run(cell), run(beside(cell))
    compare.bits(older.select("initial/parameter/"), newer.select("initial/parameter/"), name="initial weights")
    gradients = [record.select("step0/gradient/") for record in (newer, older)]
    compare.tensors(*gradients, name="gradient at step 0, FSDP2 and FSDP1", within=_apart(newer, older))
    compare_steps(older)
    replayed_parameters(older)


@law("STREAM-4", reference=FSDP1_AND_FSDP2, since="2.8", substrates=CUDA)
def test_fsdp2_needs_no_more_of_a_device_than_fsdp1(measure: Measure, cell: Cell) -> None:
    """While the host runs ahead of the device, the peak of what FSDP2 holds of it (`active`: in use, or freed but held
    for a stream) MUST be at most FSDP1's, with limit_all_gathers and without.
    """
    older, newer = (measure("device_memory:step_on_device", one) for one in (cell, beside(cell)))
    for rank, (of_fsdp1, of_fsdp2) in enumerate(zip(older, newer, strict=True)):
        for kind in ("allocated", "reserved"):
            report(f"{kind}, FSDP1, rank {rank}", of_fsdp1[kind], unit="bytes")
            report(f"{kind}, FSDP2, rank {rank}", of_fsdp2[kind], unit="bytes")
        limit = of_fsdp1["active"]
        compare.between(of_fsdp2["active"], 0, limit, name="active peak", detail=f"FSDP2, rank {rank}", unit="bytes")


@law("MEM-8", reference=FSDP1_AND_FSDP2, substrates=SIMULATED)
def test_fsdp2_holds_no_more_than_fsdp1_and_its_own_buffers(measure: Measure, cell: Cell) -> None:
    """At its peaks in forward and in backward FSDP2 MUST hold at most what FSDP1 holds, and the buffers that it has of
    its own instead of record_stream: outputs of all-gathers, inputs of reduce-scatters.

    Beside parameters and optimizer state, and on the CPU, where no stream has to be waited for: what FSDP1 hands to
    record_stream is there again at once, and limit_all_gathers changes nothing. That is the least that FSDP1 can need;
    what it needs of a device is judged by STREAM-4.
    """
    config = trainer_config(cell)
    dims = resolve_mesh(config.mesh, world_size=cell.world_size)
    shapes = local_shapes(config.model, tp=dims.tp, tp_rank=0)
    for_fsdp1, for_fsdp2 = (
        msgspec.convert(measure("memory:without_fsdp", one, alone=True)[0], list[Segment])
        for one in (cell, beside(cell))
    )
    expected = predict_fsdp1(config, dims, shapes, for_fsdp1)
    own = {
        phase: max(0, usage.peak_bytes - expected[phase].peak_bytes)
        for phase, usage in predict(config, dims, shapes, for_fsdp2).items()
        if phase in _PHASES
    }
    older, newer = (_peaks(*measure("memory:step_in_simulation", one, alone=True)) for one in (cell, beside(cell)))
    for phase in _PHASES:
        least, limit = expected[phase].peak_bytes, older[phase] + own[phase] + _SCALARS_BYTES
        of_fsdp1, of_fsdp2 = (f"{implementation}'s peak of {phase}" for implementation in ("FSDP1", "FSDP2"))
        compare.between(
            older[phase], least, least + _SCALARS_BYTES, name=of_fsdp1, detail="rank 0, by its model", unit="bytes"
        )
        detail = f"rank 0 (FSDP1's is {older[phase]}, own buffers {own[phase]})"
        compare.between(newer[phase], 0, limit, name=of_fsdp2, detail=detail, unit="bytes")


def _apart(newer: Record, older: Record) -> dict[str, float]:
    """How far gradients at step 0 may be apart: each from its emulation as sums in any order lead, and the emulations
    by what only one of them rounds, such as gradients of norms from torch 2.15 on."""
    masters = newer.select("step0/parameter/")
    configs = [trainer_config(record.cell) for record in (newer, older)]
    new, old = (emulated_step(config, masters, step=0, device=newer.device_type) for config in configs)
    return {
        name: bound + compare.deviation(new.gradients[name], old.gradients[name])
        for name, bound in tolerance.emulated_gradients(configs[1], old).items()
    }


def beside(cell: Cell) -> Cell:
    """The same run with FSDP2."""
    return cell.but(implementation="fsdp2", limit_all_gathers=True)


def _peaks(measured: Mapping[str, Any]) -> dict[str, int]:
    return {one["mark"]: one["peak_bytes"] for one in measured["segments"] if one["mark"] in _PHASES}
