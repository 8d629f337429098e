"""Traffic of FSDP: expected from the layouts of a subject's parameters, and issued by its ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conformance.instruments.facts import Collective
from conformance.outcomes import Unsupported
from conformance.subjects.evidence import SubjectRecord
from conformance.subjects.facts import ShardedParameter, SubjectFacts

GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"
_FLOATING = ("float", "bfloat")


@dataclass(frozen=True)
class FsdpGroup:
    """Ranks with different data among which parameters are sharded, as one of them sees the group."""

    name: str
    """Name of the group in the log of collectives."""
    ranks: tuple[int, ...]
    replicas: str | None
    """Name of the group of ranks that hold copies of the same shards for other data, if there is one."""
    shard_numels: dict[str, int]
    """Elements of a shard, padded to that of the group's largest, by parameter; FSDP2 gathers and reduces these."""

    def numel(self, names: Iterable[str]) -> int:
        """Return the elements of the shards of some of the group's parameters."""
        return sum(self.shard_numels[name] for name in names if name in self.shard_numels)

    def numel_by_calls(self, names: Iterable[str], facts: SubjectFacts) -> int:
        """Return the same, each parameter's as often as its module computes in a forward pass."""
        return sum(self.numel([name]) * facts.calls.get(name, 1) for name in names)


def fsdp_groups(record: SubjectRecord, rank: int) -> list[FsdpGroup]:
    """Return the groups in which a rank shards parameters.

    Raises Unsupported if it shards none among ranks with different data, which `fsdp-is-on` reports.
    """
    by_ranks: dict[tuple[int, ...], dict[str, ShardedParameter]] = {}
    for name, parameter in record.ranks[rank].parameters.items():
        for ranks in _with_other_data(record, parameter.shard_ranks):
            by_ranks.setdefault(ranks, {})[name] = parameter
    if not by_ranks:
        raise Unsupported("no parameter is sharded over ranks with different data")
    return [_group(record, ranks, parameters) for ranks, parameters in by_ranks.items()]


def _group(record: SubjectRecord, ranks: tuple[int, ...], parameters: dict[str, ShardedParameter]) -> FsdpGroup:
    replicas = [copies for p in parameters.values() for copies in _with_other_data(record, p.replica_ranks)]
    return FsdpGroup(
        name=_name(ranks, record.world_size),
        ranks=ranks,
        replicas=_name(replicas[0], record.world_size) if replicas else None,
        shard_numels={
            name: max(record.ranks[member].parameters[name].local_numel for member in ranks) for name in parameters
        },
    )


def _with_other_data(record: SubjectRecord, groups: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    data_ranks = [facts.data_rank for facts in record.ranks]
    return [tuple(ranks) for ranks in groups if len({data_ranks[rank] for rank in ranks}) > 1]


def _name(ranks: Sequence[int], world_size: int) -> str:
    return "world" if len(ranks) == world_size else f"ranks {','.join(map(str, ranks))}"


def shard_group_names(record: SubjectRecord, rank: int) -> list[str]:
    """Return the names of all groups of several ranks that shard a trained parameter of a rank, in any dimension."""
    trained = [parameter for parameter in record.ranks[rank].parameters.values() if parameter.is_trained]
    groups = {tuple(ranks) for parameter in trained for ranks in parameter.shard_ranks if len(ranks) > 1}
    return [_name(ranks, record.world_size) for ranks in sorted(groups)]


def fsdp_collectives(
    facts: SubjectFacts, group: FsdpGroup, kind: str, *, step: int, in_first_forward: bool = False
) -> list[Collective]:
    """Return the collectives of a kind that FSDP can have issued in a step: over its groups, of floating numbers.

    The all-reduces are those of gradients over replicas, in backward; an all-reduce of a single number is a loss's.
    """
    end = facts.first_backward[step] if in_first_forward else None
    chosen = [c for c in facts.collectives[:end] if (c.step, c.kind) == (step, kind) and c.dtype.startswith(_FLOATING)]
    if kind == ALL_REDUCE:
        return [c for c in chosen if c.group == group.replicas and c.phase == "backward" and c.numel > 1]
    return [c for c in chosen if c.group == group.name and c.phase in ("forward", "backward")]


def reductions(facts: SubjectFacts) -> list[str]:
    """Return the collectives that reduce gradients in backward: kind, dtype and operation, each once."""
    kinds = (REDUCE_SCATTER, ALL_REDUCE)
    chosen = [c for c in facts.collectives if c.phase == "backward" and c.kind in kinds]
    return sorted({f"{c.kind} {c.dtype} {c.reduce_op}" for c in chosen})
