"""Laws of any trainer about memory: that of an accelerator's caching allocator, or the storages that a run holds.

What they allow is derived beside each: bytes that a correct trainer may hold, whatever its model and its loop. Storages
of the CPU are seen from the operator that returns them to their end; memory inside of an operator is not.
"""

from conformance.assertions import compare
from conformance.judge.law import law
from conformance.judge.measurements import measure as report
from conformance.subjects.evidence import Evidence, Under
from conformance.subjects.facts import AllocatorFacts, HeldMemory, PhasePeaks, SubjectFacts
from conformance.subjects.memory_log import BUILD
from conformance.subjects.memory_model import (
    NUMBERS_BYTES,
    full_bytes,
    gathered_ahead_bytes,
    in_flight_bytes,
    other_models_bytes,
    rooms,
    shard_bytes,
)

FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"


@law(
    "memory-held",
    of="any trainer",
    like="MEM-1",
    where="world > 1",
    gaps=["streams-alike"],
    reference=FULLY_SHARD,
)
def test_no_more_than_the_state_is_held(evidence: Evidence) -> None:
    """Besides the state of training (shards, buffers, gradients, the optimizer's state, and other tensors that are
    sharded) a device MUST hold no more than a second copy of its shards when the model is built, and after each step no
    more than then. Where parameters are offloaded, they, their gradients and the optimizer's state MUST NOT be on the
    accelerator.

    Wrong if full weights stay after they were sharded, or a group stays gathered.

    Sharded tensors are what they should be, however many: moving averages, a frozen teacher. Room for one more copy of
    the shards is for local tensors, such as masters in another dtype; an unsharded model is at least two copies. What a
    module or a cached function keeps for its next call, such as a mask, counts as a buffer; `memory-of-steps` finds it
    if it grows. A step may leave the tensors that variables of its loop still name. They are at most what its forward
    passes have added at their peak, and nothing but numbers where the suite's loop takes the steps. A trainer's own
    loop has read its first micro-batches before the model is seen, and may hold its dataset; and it may have gathered
    groups by then, which each step must free.
    """
    leaves_device = evidence.cell.offload and evidence.cell.device != "cpu"
    for facts in evidence.record.ranks:
        memory = memory_of(facts)
        built, *steps = memory.held
        # Not the bytes of their storages: a shard that is a view of its full weight would double the room.
        room = 0 if leaves_device else sum(map(shard_bytes, facts.parameters.values()))
        room += facts.batch_bytes + facts.dataset_bytes if facts.is_own_loop else 0
        room += other_models_bytes(evidence, facts, BUILD)
        gathered = gathered_ahead_bytes(evidence, facts, BUILD + 1)
        room += sum(gathered) + max(gathered, default=0)
        copy_bytes = sum(map(full_bytes, facts.parameters.values()))
        where = f"rank {facts.rank}, when the model is built; a full copy of all parameters: {copy_bytes} bytes"
        _expect_at_most(built.other_bytes, room + NUMBERS_BYTES, "held besides the state", where)
        for held in steps:
            left = _forward_bytes(memory, held.step) if facts.is_own_loop else 0
            room = built.other_bytes - sum(gathered) + left + (held.step + 1) * NUMBERS_BYTES
            where = f"rank {facts.rank}, after step {held.step}"
            _expect_at_most(held.other_bytes, room, "held besides the state", where)
        for held in memory.held if leaves_device else ():
            _expect_offloaded(facts, held)


def _expect_offloaded(facts: SubjectFacts, held: HeldMemory) -> None:
    where = f"rank {facts.rank}, step {held.step}"
    for kind in ("parameters", "gradients", "optimizer"):
        _expect_at_most(held.known_bytes[kind], 0, f"{kind} on the device although offloaded", where)


def _forward_bytes(memory: AllocatorFacts, step: int) -> int:
    """Return the bytes by which the forward passes of a step have, at their peak, exceeded those held before it."""
    before = {held.step: held.requested_bytes for held in memory.held}[step - 1]
    return max((each.requested_bytes for each in memory.peaks if _is(each, step, "forward")), default=before) - before


@law(
    "memory-by-phase",
    of="any trainer",
    like="MEM-3",
    where="world > 1 and saved_on = none",  # a run that is built again holds two models for a moment
    reference=FULLY_SHARD,
)
def test_each_phase_needs_what_its_groups_need(evidence: Evidence) -> None:
    """At its peak, and when it begins, each phase of a step MUST add to the memory held before the step no more than
    its activations, its gradients and the buffers of the groups that FSDP2 has made, as these were told to reshard and
    to gather ahead.

    Wrong if groups stay gathered between forward and backward that nobody asked to keep, full gradients are held after
    backward, or a graph outlives its micro-batch.

    The memory model is `conformance.subjects.memory_model`. When backward begins, only activations and kept groups are
    there, and before clipping only gradients: there the bound is tight. Peaks have room for buffers of FSDP2 that need
    not meet. In bf16 each group may have copies of the model's tables in fp32, such as those of RoPE, whose casts FSDP2
    makes where a group begins. Clipping may copy all gradients once, the optimizer three times; one that gathers
    tensors, as Muon does, needs what it needs in one process. Of a loop of the trainer's own, variables may name the
    model's outputs, in three copies.
    """
    for facts in evidence.record.ranks:
        memory = memory_of(facts)
        held = {each.step: each.requested_bytes for each in memory.held}
        for step in evidence.steps:
            told = {each.phase: each for each in memory.peaks if each.step == step}
            for room in rooms(evidence, facts, memory, step):
                if room.phase in told:
                    peak, where = told[room.phase], f"rank {facts.rank}, {room.phase} of step {step}"
                    _expect_at_most(peak.start_bytes - held[step - 1], room.start_bytes, "held at the start", where)
                    _expect_at_most(peak.requested_bytes - held[step - 1], room.peak_bytes, "peak", where)


@law(
    "memory-of-steps",
    of="any trainer",
    like="MEM-6",
    where="world > 1",
    gaps=["streams-alike"],
    reference=FULLY_SHARD,
)
def test_steps_need_the_same_memory(evidence: Evidence, under: Under) -> None:
    """A step that repeats another one (the same micro-batches and weights) MUST have no higher peak in any phase, and
    MUST leave no more memory, from the second step on.

    Wrong if a tensor of each step is kept, as a loss with its graph, or a buffer is made anew each time.

    The first step makes the optimizer's state and other lasting buffers. All others issue the same operators, so that
    each byte more is one that an earlier step has left; only numbers may be kept. On the CPU peaks also vary by what
    gloo's threads have not released yet.
    """
    turns = evidence.reference.facts.turns
    for facts in under("lazy", is_repeated=True).ranks:
        memory = memory_of(facts)
        held = {each.step: each.requested_bytes for each in memory.held}
        room = NUMBERS_BYTES + in_flight_bytes(evidence, facts)
        for peak in memory.peaks:
            earlier = next((each for each in memory.peaks if _is(each, peak.step - turns, peak.phase)), None)
            if peak.step >= 2 * turns and earlier is not None:
                grown, where = peak.requested_bytes - earlier.requested_bytes, f"rank {facts.rank}, step {peak.step}"
                _expect_at_most(grown, room, f"growth of the peak of {peak.phase}", where)
                report(f"peak of {peak.phase}, {where}", peak.requested_bytes, kind="memory", unit="bytes")
        for step in range(2 * turns, max(held) + 1):
            _expect_at_most(held[step] - held[step - turns], NUMBERS_BYTES, "left by a step", f"rank {facts.rank}")


def memory_of(facts: SubjectFacts) -> AllocatorFacts:
    """Return the memory of a rank."""
    assert facts.memory is not None, "the record has no memory"
    return facts.memory


def _is(peaks: PhasePeaks, step: int, phase: str) -> bool:
    return (peaks.step, peaks.phase) == (step, phase)


def _expect_at_most(measured: int, room: int, name: str, where: str) -> None:
    compare.between(max(measured, 0), 0, room, name=name, detail=where, unit="bytes")
