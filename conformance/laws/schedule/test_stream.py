"""STREAM: memory that several streams use: kept alive for them, and accessed in order."""

import torch

from conformance.assertions import compare
from conformance.assertions.axes.proofs import prove
from conformance.assertions.fixtures import Measure, Run
from conformance.experiments.memory import (
    DevicePeaks,
    step_in_simulation,
    step_on_device,
    step_with_older_process_group,
)
from conformance.experiments.staging import staged_behind_the_device
from conformance.experiments.training import train_with_delays
from conformance.instruments.facts import IssuedOperator, UnorderedOperators
from conformance.judge.law import law
from conformance.judge.measurements import measure as report
from conformance.outcomes import ConformanceFailure, Unsupported
from conformance.plan.cells import RECORD_STREAMS, Cell
from conformance.plan.substrates import STREAMS
from conformance.torch_release import release

AVOID_RECORD_STREAMS = "https://github.com/pytorch/pytorch/pull/150398"


@law(
    "STREAM-1",
    where="record_streams != unset",
    gaps=["second-run", "large-models"],
    reference=AVOID_RECORD_STREAMS,
    since="2.8",
)
def test_avoid_record_streams_variable_changes_nothing(run: Run, measure: Measure, cell: Cell) -> None:
    """A run with any value of TORCH_NCCL_AVOID_RECORD_STREAMS MUST be the same as without it: in every bit, in all
    collectives, and in the memory of each phase.

    From torch 2.8 on nothing but a warning depends on the variable. AXIS-1's proof is repeated first: ranks had the
    variable before they made their process group. Memory is that of a simulated world, without the blocks that several
    streams of a GPU use. Gloo does not read the variable: on the CPU the law judges its effects above the backend.
    """
    unset = cell.but(record_streams="unset")
    record, other = run(cell), run(unset)
    prove("record_streams", record, other)
    for kind in sorted({key.rpartition("/")[0] for key in other.ranks[0].fingerprints}):
        compare.bits(record.select(f"{kind}/"), other.select(f"{kind}/"), name=kind)
    for facts, expected in zip(record.ranks, other.ranks, strict=True):
        if facts.collectives != expected.collectives:
            raise ConformanceFailure(f"rank {facts.rank} issued other collectives")
    with_it, without = (measure(step_in_simulation, each)[0].segments for each in (cell, unset))
    differences = [(a, b) for a, b in zip(with_it, without, strict=True) if a != b]
    detail = f"{differences[:1]}"
    compare.count(len(differences), name="phases with other memory", expected=0, detail=detail, unit="segments")


@law(
    "STREAM-2",
    where="model = deep and features <= 2 and implementation = fsdp2",
    gaps=["pipelines"],
    reference=AVOID_RECORD_STREAMS,
    substrates=STREAMS,
)
def test_record_stream_holds_no_memory(measure: Measure, cell: Cell) -> None:
    """The caching allocator MUST hold no memory for streams that have not caught up (peak of `active` above
    `allocated`), although the host runs ahead of the device: with any value of TORCH_NCCL_AVOID_RECORD_STREAMS, up to
    torch 2.7 with 1.

    Neither FSDP2 nor, as torch says since 2.8, the process group calls record_stream. Before 2.8, without the variable,
    the buffers of asynchronous collectives of tensor parallelism are held, and nothing can be judged. On the simulated
    accelerator the peaks are those of a model of the allocator, at both ends of what timings can do; a process group of
    torch 2.7 is modelled, too: with the variable it is judged, and what it holds without is reported.
    """
    if cell.record_streams != "1" and release(str(torch.__version__)) < (2, 8):
        raise Unsupported(f"up to torch 2.7 memory is held unless {RECORD_STREAMS} is 1; this is {torch.__version__}")
    for rank, measured in enumerate(measure(step_on_device, cell)):
        for timing, peaks in measured.items():
            _expect_nothing_held(peaks, f"rank {rank}, device {timing}")
    for rank, measured in enumerate(measure(step_with_older_process_group, cell)):
        if measured:
            _expect_nothing_held(measured["1"], f"rank {rank}, process group of torch 2.7, {RECORD_STREAMS}=1")
            held = measured["0"].active - measured["0"].allocated
            report(f"held by a process group of torch 2.7, rank {rank}", held, kind="memory", unit="bytes")


def _expect_nothing_held(peaks: DevicePeaks, where: str) -> None:
    detail, name = f"{where}, active {peaks.active}, allocated {peaks.allocated}", "held for streams"
    compare.count(peaks.active - peaks.allocated, name=name, expected=0, detail=detail, unit="bytes", kind="memory")


@law(
    "STREAM-5",
    where="world > 1 and world <= 4 and implementation = fsdp2",
    gaps=["delay-cost", "large-models"],
    numbers=True,
    own_run=True,
    reference="https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams",
)
def test_delayed_collectives_and_copies_change_no_bit(run: Run, measure: Measure, cell: Cell) -> None:
    """A run MUST be the same in every bit with delayed all-gathers, reduce-scatters, all-reduces, transfers between
    stages, copies between device and host, or all of them, on the last rank or on the streams of a device.

    Wrong if a tensor is used before it is complete, or its memory is handed out again while it is in use. In a pipeline
    the first rank is delayed, too, in a separate run: its peers wait for its activations. On a device, freed memory is
    filled with NaN. On the simulated accelerator, schedules of its streams delay.
    """
    record = run(cell)
    for facts, delayed in zip(record.ranks, measure(train_with_delays, cell), strict=True):
        for operators, fingerprints in delayed.items():
            wrong = [key for key, value in fingerprints.items() if facts.fingerprints[key] != value]
            how = f"under schedule {operators}" if record.device_type == "sim" else f"with {operators} delayed"
            name, detail = f"changed {how}", f"rank {facts.rank}: {', '.join(wrong[:4])}"
            compare.count(len(wrong), name=name, expected=0, detail=detail, unit="tensors")


@law(
    "STREAM-6",
    where="world > 1 and implementation = fsdp2",
    gaps=["large-models"],
    reference="https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams",
    substrates=("gloo", "sim"),
)
def test_fully_shard_orders_conflicting_accesses_of_streams(run: Run, cell: Cell) -> None:
    """Every two conflicting accesses of different streams MUST be ordered by events: in the last step, two operators
    that access the same bytes of memory, of which one writes, or of which one may be given the memory that the other
    has used.

    Wrong if a stream does not wait for another one, or if memory is released too early. On the CPU FSDP issues the same
    streams and events as on a device, and all runs in order: the law judges every timing of streams that events permit.
    The simulated device adds accesses of the host to pinned memory.
    """
    for facts in run(cell).ranks:
        if facts.streams is None or len(facts.streams.operators) < 2 or not facts.streams.waits:
            raise RuntimeError(f"torch {torch.__version__} asks the device for no streams: {facts.streams} on a rank")
        pairs = facts.streams.unordered
        detail = f"rank {facts.rank}: {_described(pairs[0])}" if pairs else ""
        name = "pairs of operators that nothing orders"
        compare.count(len(pairs), name=name, expected=0, detail=detail, unit="kinds of pairs")


def _described(pair: UnorderedOperators) -> str:
    relation = "may be given the memory of" if pair.reused else "accesses the same memory as"
    return f"{_place(pair.second)} {relation} {_place(pair.first)}"


def _place(issued: IssuedOperator) -> str:
    """Name an operator with the frames of FSDP that issued it, or with the innermost ones if it is not FSDP's."""
    frames = [frame for frame in issued.stack if "/_fully_shard/" in frame] or issued.stack
    return f"{issued.operator} on {issued.stream} ({', from '.join(frames[:3])})"


@law(
    "STREAM-7",
    where="id in (dp2-fp32-default-meta, hsdp2x2-fp32-default-meta)",
    reference="https://docs.pytorch.org/docs/stable/distributed.checkpoint.html",
    since="2.9",
    substrates=STREAMS,
)
def test_staged_states_are_those_at_the_call(measure: Measure, cell: Cell) -> None:
    """A stager of torch.distributed.checkpoint MUST hand over the values that all operators before its call compute,
    although the device has not computed them yet, each time and with any options.

    A copy that is too early is a checkpoint of weights before the last step. Under three schedules of the simulated
    device; a GPU is kept behind its host by products of matrices, which is unverified.
    """
    ranks = measure(staged_behind_the_device, cell)
    wrong = {name: [fault for faults in ranks for fault in faults[name]] for name in ranks[0]}
    details = {name: faults[0] for name, faults in wrong.items() if faults}
    compare.none({name: len(faults) for name, faults in wrong.items()}, details=details, unit="copies")
