"""What records can differ in, as the proofs of axes compare it."""

from collections import Counter

from conformance.outcomes import ConformanceFailure
from conformance.run.record import Record


def expect(holds: bool, effect: str) -> None:
    __tracebackhide__ = True
    if not holds:
        raise ConformanceFailure(effect)


def operators(record: Record, phase: str) -> Counter[str]:
    """Number of calls on all ranks by name."""
    return sum((Counter(facts.operators[phase]) for facts in record.ranks), Counter())


def layer_count(record: Record) -> int:
    return len({name.split(".")[1] for name in record.ranks[0].parameters if name.startswith("layers.")})


def collectives(record: Record, phase: str, kind: str, group: str) -> int:
    """Number on all ranks."""
    found = ((e.phase, e.kind, e.group) for facts in record.ranks for e in facts.collectives)
    return sum(event == (phase, kind, group) for event in found)


def parts(record: Record, prefix: str) -> set[tuple[str, str]]:
    """Key and fingerprint of what the ranks hold below a prefix."""
    pairs = (pair for facts in record.ranks for pair in facts.fingerprints.items())
    return {(key, found) for key, found in pairs if key.startswith(prefix)}


def same(record: Record, neighbour: Record, prefix: str) -> bool:
    return parts(record, prefix) == parts(neighbour, prefix)


def batches(record: Record) -> set[str]:
    """Digests of the inputs of all ranks and steps."""
    return {batch["inputs"] for facts in record.ranks for batch in facts.batches}
