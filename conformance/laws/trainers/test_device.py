"""Laws of any trainer about the streams of an accelerator, judged on the simulated one.

The allocator's bytes are exact and its schedules are known there, so that these laws have no tolerance for noise. What
they allow is derived beside each: bytes that a correct trainer may hold, whatever its model and its loop.
"""

from collections.abc import Iterator, Sequence

from conformance.assertions import compare
from conformance.instruments.facts import UnorderedOperators
from conformance.judge.law import law
from conformance.outcomes import Unsupported
from conformance.plan.substrates import SIM
from conformance.subjects.evidence import Evidence, Under
from conformance.subjects.facts import AcceleratorFacts, AllocatorFacts, PhasePeaks, SubjectFacts

STREAMS = "https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams"
FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"


@law("unordered-accesses", of="any trainer", like="STREAM-6", where="world > 1", reference=STREAMS, substrates=SIM)
def test_conflicting_accesses_are_ordered(evidence: Evidence) -> None:
    """In all steps every two conflicting accesses of different streams, or of a stream and the host, MUST be ordered:
    two operators that access the same bytes, of which one writes, or of which one may be given the memory that the
    other has used.

    Wrong if a stream does not wait for another one, memory is released too early, or the host uses pinned memory before
    a copy has ended. Events and the host's waits order; a wait that only the suite needs does not. The law considers
    every timing that these allow, not only that of the run.
    """
    for facts in evidence.record.ranks:
        streams = _accelerator(facts).streams
        if len(streams.operators) < 2:
            raise Unsupported("the run used one stream alone")
        pairs = streams.unordered
        detail = f"rank {facts.rank}: {_described(pairs[0])}" if pairs else ""
        name = "pairs of operators that nothing orders"
        compare.count(len(pairs), name=name, expected=0, detail=detail, unit="kinds of pairs")


def _described(pair: UnorderedOperators) -> str:
    relation = "may be given the memory of" if pair.reused else "accesses the same memory as"
    first, second = (
        f"{issued.operator} on {issued.stream} ({', from '.join(issued.stack[:3])})"
        for issued in (pair.first, pair.second)
    )
    return f"{second} {relation} {first}"


@law(
    "schedules-agree",
    of="any trainer",
    like="STREAM-5",
    where="world > 1",
    gaps=["streams-alike"],
    reference=STREAMS,
    substrates=SIM,
)
def test_schedules_change_no_bit(evidence: Evidence, under: Under) -> None:
    """A run MUST be the same in every bit, gradients, norms and parameters of all steps, under every schedule of the
    device: one that keeps up with the host, one that is as far behind as events permit, one that delays a single stream
    (of each that works), and a random one.

    Wrong if a tensor is used before it is complete, or its memory is handed out again while it is in use.
    """
    for schedule in _schedules(evidence.record.ranks):
        for facts, expected in zip(under(schedule).ranks, evidence.record.ranks, strict=True):
            digests, others = expected.fingerprints, facts.fingerprints
            wrong = [key for key in {**digests, **others} if digests.get(key) != others.get(key)]
            detail = f"rank {facts.rank}: {', '.join(wrong[:4])}"
            name = f"changed under schedule {schedule}"
            compare.count(len(wrong), name=name, expected=0, detail=detail, unit="tensors")
            numbers = repr(expected.grad_norms), repr(facts.grad_norms)  # NaN equals itself as a text only
            detail = f"rank {facts.rank}: {numbers[1]}, expected {numbers[0]}"
            name = f"lists of norms changed under schedule {schedule}"
            compare.count(len({*numbers}) - 1, name=name, expected=0, detail=detail, unit="lists")


def _schedules(ranks: Sequence[SubjectFacts]) -> list[str]:
    """Return the schedules with which the session's is compared."""
    busy = sorted({number for facts in ranks for number in _accelerator(facts).busy_streams})
    schedules = ["eager", "lazy", *(f"starve:{number}" for number in busy), "random:1"]
    return [schedule for schedule in schedules if schedule != _accelerator(ranks[0]).schedule]


@law(
    "memory-of-streams",
    of="any trainer",
    like="STREAM-2",
    where="world > 1",
    gaps=["streams-alike"],
    reference=FULLY_SHARD,
    substrates=SIM,
)
def test_a_device_behind_its_host_needs_no_more_memory(under: Under) -> None:
    """The peak of memory in each phase MUST be the same for a device that keeps up with the host and for one that is as
    far behind as events permit, except for as much as the micro-batches of a step; no more MUST wait for a stream after
    it was freed.

    Wrong if blocks wait for streams (`record_stream`), or are freed when the device has got somewhere: the peak then
    depends on timings, and is highest when the host runs ahead.

    FSDP2 promises this for its own memory. Of a trainer's own tensors only micro-batches are made on one stream and
    used on another one, by loaders that copy ahead: each may wait for its stream.
    """
    pairs = zip(under("eager", is_repeated=True).ranks, under("lazy", is_repeated=True).ranks, strict=True)
    for eager, lazy in pairs:
        for near, far in _same_phases(_allocator(eager), _allocator(lazy)):
            where = f"rank {lazy.rank}, step {far.step}"
            name = f"peak of {far.phase} above that of a device that keeps up"
            _expect_at_most(far.requested_bytes - near.requested_bytes, lazy.batch_bytes, name, where)
            name = f"waiting for streams in {far.phase}"
            _expect_at_most(far.waiting_bytes, lazy.batch_bytes, name, where)


def _accelerator(facts: SubjectFacts) -> AcceleratorFacts:
    assert facts.accelerator is not None, "the run was not on an accelerator"
    return facts.accelerator


def _allocator(facts: SubjectFacts) -> AllocatorFacts:
    assert facts.memory is not None, "the record has no memory"
    return facts.memory


def _is(peaks: PhasePeaks, step: int, phase: str) -> bool:
    return (peaks.step, peaks.phase) == (step, phase)


def _same_phases(first: AllocatorFacts, second: AllocatorFacts) -> Iterator[tuple[PhasePeaks, PhasePeaks]]:
    """Yield the peaks of each phase that both runs have told."""
    for each in first.peaks:
        yield from ((each, other) for other in second.peaks if _is(other, each.step, each.phase))


def _expect_at_most(measured: int, room: int, name: str, where: str) -> None:
    compare.between(max(measured, 0), 0, room, name=name, detail=where, unit="bytes")
