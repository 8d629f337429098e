"""Facts in which records can differ, for the proofs of axes."""

from collections import Counter

from conformance.outcomes import ConformanceFailure
from conformance.run.record import Record


def expect(holds: bool, effect: str) -> None:
    """Raise ConformanceFailure with a description of the observed effect, unless the effect is the expected one."""
    __tracebackhide__ = True
    if not holds:
        raise ConformanceFailure(effect)


def operators(record: Record, phase: str) -> Counter[str]:
    """Return the number of calls of each operator in a phase, on all ranks together, by name."""
    return sum((Counter(facts.operators[phase]) for facts in record.ranks), Counter())


def layer_count(record: Record) -> int:
    """Return the number of transformer blocks."""
    return len({name.split(".")[1] for name in record.ranks[0].parameters if name.startswith("layers.")})


def collectives(record: Record, phase: str, kind: str, group: str) -> int:
    """Return the number of collectives of one kind in a phase over a group, on all ranks together."""
    issued = ((e.phase, e.kind, e.group) for facts in record.ranks for e in facts.collectives)
    return sum(event == (phase, kind, group) for event in issued)


def held(record: Record, prefix: str) -> set[tuple[str, str]]:
    """Return key and fingerprint of all tensors of ranks whose key begins with the prefix."""
    pairs = (pair for facts in record.ranks for pair in facts.fingerprints.items())
    return {(key, fingerprint) for key, fingerprint in pairs if key.startswith(prefix)}


def same(record: Record, neighbour: Record, prefix: str) -> bool:
    """Return whether ranks of both runs hold the same bits in all tensors whose key begins with the prefix."""
    return held(record, prefix) == held(neighbour, prefix)


def batches(record: Record) -> set[str]:
    """Return the digests of the inputs of all ranks and steps."""
    return {batch["inputs"] for facts in record.ranks for batch in facts.batches}
