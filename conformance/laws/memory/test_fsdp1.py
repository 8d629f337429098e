"""STREAM-3, STREAM-4, MEM-8: FSDP2 compared with FSDP1, in its numbers and in its memory."""

from conformance.assertions import compare
from conformance.assertions.fixtures import Measure, Run
from conformance.assertions.memory_bounds import SCALARS_BYTES, sizes_of
from conformance.assertions.steps import compare_steps, replayed_parameters
from conformance.bound import Bound, bound
from conformance.experiments.memory import StepMemory, step_in_simulation, step_on_device
from conformance.experiments.without_fsdp import profile_without_fsdp
from conformance.judge.law import law
from conformance.judge.measurements import measure as report
from conformance.oracles import tolerance
from conformance.oracles.emulation import emulated_step
from conformance.oracles.fsdp1_memory import predict_fsdp1
from conformance.oracles.memory_model import group_bytes, predict, resident_bytes
from conformance.plan.cells import Cell
from conformance.plan.substrates import SIMULATED, STREAMS
from conformance.run.record import Record

FSDP1 = "https://docs.pytorch.org/docs/stable/fsdp.html#torch.distributed.fsdp.FullyShardedDataParallel"
FSDP1_AND_FSDP2 = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"

_PHASES = ("forward", "backward")


@law("STREAM-3", where="implementation = fsdp1 and model != deep", gaps=["large-models"], numbers=True, reference=FSDP1)
def test_fsdp1_and_fsdp2_compute_the_same_gradients(run: Run, cell: Cell) -> None:
    """From the same weights FSDP1 and FSDP2 MUST compute the same gradients, except for the order of sums and for
    rounding that only one of them does; and each step of FSDP1 MUST be that of one process with the same rounding, as
    for FSDP2.

    Only then can their memory be compared.
    """
    older, newer = run(cell), run(with_fsdp2(cell))
    compare.bits(older.select("initial/parameter/"), newer.select("initial/parameter/"), name="initial weights")
    gradients = [record.select("step0/gradient/") for record in (newer, older)]
    compare.tensors(*gradients, name="gradient at step 0, FSDP2 and FSDP1", within=_distances(newer, older))
    compare_steps(older)
    replayed_parameters(older)


@law(
    "STREAM-4",
    where="implementation = fsdp1 and model = deep",
    reference=FSDP1_AND_FSDP2,
    since="2.8",
    substrates=STREAMS,
)
def test_fsdp2_active_peak_is_at_most_fsdp1s(measure: Measure, cell: Cell) -> None:
    """While the host runs ahead of the device, the peak of FSDP2's `active` memory (in use, or freed but held for a
    stream) MUST be at most FSDP1's, with limit_all_gathers and without; where parameters are never resharded, at most
    FSDP1's and the outputs of two all-gathers.

    FSDP1 gathers into the parameters themselves. FSDP2 copies them out, and keeps the output until the next group has
    copied its own: that shows where parameters are never resharded. On the simulated accelerator the device is as far
    behind as events permit; where it keeps up, as on the CPU, the peaks are reported, and MEM-8 bounds them.
    """
    older, newer = (measure(step_on_device, each) for each in (cell, with_fsdp2(cell)))
    config, dims, shapes = sizes_of(cell)
    gathered = 2 * max(group_bytes(config, dims, shapes).values()) if cell.reshard == "never" else 0
    for rank, (fsdp1, fsdp2) in enumerate(zip(older, newer, strict=True)):
        for name, by_timing in (("FSDP1", fsdp1), ("FSDP2", fsdp2)):
            for timing, peaks in by_timing.items():
                for kind in ("allocated", "active", "reserved"):
                    value = getattr(peaks, kind)
                    report(f"{kind}, {name}, device {timing}, rank {rank}", value, kind="memory", unit="bytes")
        (timing,) = fsdp2.keys() - {"eager"}
        active, limit = fsdp2[timing].active, fsdp1[timing].active + gathered
        compare.between(active, 0, limit, name="active peak", detail=f"FSDP2, rank {rank}", unit="bytes")


@law("MEM-8", where="model = deep and implementation = fsdp1", reference=FSDP1_AND_FSDP2, substrates=SIMULATED)
def test_fsdp2_holds_no_more_than_fsdp1_and_its_own_buffers(measure: Measure, cell: Cell) -> None:
    """FSDP2 MUST hold at its peaks in forward and in backward at most the memory that FSDP1 holds, and the buffers that
    FSDP2 keeps instead of calling record_stream: outputs of all-gathers, inputs of reduce-scatters.

    Parameters and optimizer state do not count; other memory that FSDP2 has left from the step before does. On the CPU,
    which waits for no stream, memory that FSDP1 passes to record_stream is free at once, and limit_all_gathers changes
    nothing. That is the least memory that FSDP1 can need; STREAM-4 judges its memory on a device.
    """
    config, dims, shapes = sizes_of(cell)
    for_fsdp1, for_fsdp2 = (measure(profile_without_fsdp, each)[0] for each in (cell, with_fsdp2(cell)))
    expected = predict_fsdp1(config, dims, shapes, for_fsdp1)
    own_bytes = {
        phase: max(0, usage.peak_bytes - expected[phase].peak_bytes)
        for phase, usage in predict(config, dims, shapes, for_fsdp2).items()
        if phase in _PHASES
    }
    (fsdp1,), (fsdp2,) = (measure(step_in_simulation, each) for each in (cell, with_fsdp2(cell)))
    left_bytes = fsdp2.held_before_bytes - resident_bytes(*sizes_of(with_fsdp2(cell)))
    older, newer = _peaks_bytes(fsdp1), _peaks_bytes(fsdp2, left_bytes=left_bytes)
    for phase in _PHASES:
        least = expected[phase].peak_bytes
        name, detail = f"FSDP1's peak of {phase}", "rank 0, by its model"
        compare.between(older[phase], least, least + SCALARS_BYTES, name=name, detail=detail, unit="bytes")
        limit = older[phase] + own_bytes[phase] + SCALARS_BYTES
        name, detail = f"FSDP2's peak of {phase}", f"rank 0 (FSDP1's is {older[phase]}, own buffers {own_bytes[phase]})"
        compare.between(newer[phase], 0, limit, name=name, detail=detail, unit="bytes")


def _distances(newer: Record, older: Record) -> dict[str, Bound]:
    """Return bounds on the distance of the gradients at step 0, by parameter.

    Each gradient differs from its emulation by the order of sums, and the emulations by rounding that only one of them
    has, such as that of norms' gradients from torch 2.15 on.
    """
    masters = newer.select("step0/parameter/")
    configs = [record.cell.config for record in (newer, older)]
    new, old = (emulated_step(config, masters, step=0, device=newer.device_type) for config in configs)
    return {
        name: bound("e + d", e=error, d=compare.deviation(new.gradients[name], old.gradients[name]))
        for name, error in tolerance.emulated_gradients(configs[1], old).items()
    }


def with_fsdp2(cell: Cell) -> Cell:
    """Return the cell with FSDP2 instead of FSDP1."""
    return cell.but(implementation="fsdp2", limit_all_gathers=True)


def _peaks_bytes(memory: StepMemory, *, left_bytes: int = 0) -> dict[str, int]:
    """Return the peak of each phase; `left_bytes` were held before the step and are no state of training."""
    return {segment.mark: segment.peak_bytes + left_bytes for segment in memory.segments if segment.mark in _PHASES}
