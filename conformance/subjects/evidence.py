"""Evidence on which laws judge a subject: the record of its ranks on a cell, its reference, and its traffic."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from safetensors import safe_open
from torch import Tensor

from conformance.bound import Bound, bound
from conformance.instruments.facts import Collective
from conformance.oracles import tolerance
from conformance.oracles.reference import total_norm
from conformance.oracles.tolerance import FP32_ROUNDOFF
from conformance.outcomes import Unsupported
from conformance.plan.cells import Cell
from conformance.run.shards import CapturedShards
from conformance.subjects.cells import SubjectCell
from conformance.subjects.facts import OwnErrors, ReferenceFacts, ShardedParameter, SubjectFacts

FP32_FACTOR = 8.0
"""Multiple of the largest of four own errors in fp32 that a correct parallel run stays below.

A parallel run adds the same numbers in one more order, so its error has the distribution of the own errors (the sums
are as long, see `oracles.tolerance`, Higham and Mary). For a tensor of one element, the worst case, errors are about
normal numbers Z of one variance: P(|Z| > 8 max |Z_1..4|) = E[P(|Z_1| < |Z| / 8)^4] is about (0.8 / 8)^4 E[Z^4] = 3e-4;
and the own error of all tensors together, which is the bound's other term, is never small by chance. Over more
elements deviations vary by less. Faults change gradients by parts of themselves, that is by 1e-3 and more.
"""
BF16_FACTOR = 4.0
"""Multiple of the own error in bf16 that a correct parallel run stays below.

Rounding points are those of one process, so that errors are about equal; tensor parallelism rounds two partial sums and
their sum where one process rounds once, and gradients that are reduced in bf16 are rounded once more: twice in both.
"""
TORCH_ADDS = 1e-6
"""Number that torch's `clip_grads_with_norm_` adds to the norm, against a division by zero."""


class SubjectRecord(CapturedShards):
    """Record of the ranks of a subject on a cell."""

    def __init__(self, directory: Path, cell: Cell, options: SubjectCell, facts: Sequence[SubjectFacts]) -> None:
        super().__init__(directory, name=cell.id, world_size=cell.world_size)
        self.cell = options
        self._facts = facts

    @property
    def ranks(self) -> Sequence[SubjectFacts]:
        """Facts by rank."""
        return self._facts

    def gradients(self, step: int, *, clipped: bool = False) -> dict[str, Tensor]:
        """Return the full gradients of a step by parameter; empty if nothing got one."""
        prefix = f"step{step}/{'clipped' if clipped else 'gradient'}/"
        return self.select(prefix) if any(key.startswith(prefix) for key in self.shards[0]) else {}

    def parameters_after(self, step: int) -> dict[str, Tensor]:
        """Return the full parameters after a step."""
        last = step == len(self.cell.accumulation) - 1
        return self.select("final/parameter/" if last else f"step{step + 1}/parameter/")


@dataclass(frozen=True)
class Reference:
    """Model of a subject in one process: facts, tensors of the more accurate process, and bounds."""

    directory: Path
    file: str
    facts: ReferenceFacts

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors of the reference by key, see `tasks.REFERENCE_FILE`."""
        with safe_open(self.directory / self.file, framework="pt") as tensors:
            return {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118 - it is no mapping

    def below(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose keys begin with a prefix, by the rest of the key."""
        return {key.removeprefix(prefix): t for key, t in self.tensors.items() if key.startswith(prefix)}

    def gradient_bounds(self, step: int) -> dict[str, Bound]:
        """Return the bound of each gradient in fp32."""
        return _bounds(self.facts.gradients[step], FP32_FACTOR)

    def update_bounds(self, step: int) -> dict[str, Bound]:
        """Return the bound of the change of each parameter since the start, in fp32."""
        return _bounds(self.facts.updates[step], FP32_FACTOR)

    def bf16_bounds(self, errors: OwnErrors) -> dict[str, Bound]:
        """Return the bound of each gradient, or change of a parameter, with own errors in bf16."""
        return _bounds(errors, BF16_FACTOR)

    def bf16_loss_bound(self) -> Bound:
        """Return the bound of a loss in bf16; raises Unsupported if the reference was not run in bf16.

        The error of a single number may be small by chance: that of all gradients is the other term, as in fp32.
        """
        errors = self.facts.bf16_gradients
        if errors is None:
            raise Unsupported("the reference was not run in bf16")
        return measured_bound(BF16_FACTOR, self.facts.bf16_loss_error, errors.overall)

    def number_bound(self, own: float) -> Bound:
        """Return the bound of a loss or a norm with an own error, in fp32."""
        overall = max(errors.overall for errors in self.facts.gradients)
        return measured_bound(FP32_FACTOR, own, overall)


@dataclass(frozen=True)
class Evidence:
    """Record of a cell, with the reference for its data."""

    record: SubjectRecord
    reference: Reference

    @property
    def cell(self) -> SubjectCell:
        """Cell that was run."""
        return self.record.cell

    @property
    def steps(self) -> range:
        """Numbers of the steps."""
        return range(len(self.cell.accumulation))


class Under(Protocol):
    """Fixture `under`: the record of the cell's run under a schedule of the simulated accelerator.

    All steps of a repeated run are the first one, see `TrainJob.is_repeated`.
    """

    def __call__(self, schedule: str, *, is_repeated: bool = False) -> SubjectRecord:
        """See `SubjectRuns.under`."""


def measured_bound(factor: float, own: float, overall: float) -> Bound:
    """Return the bound of a quantity with an own error, among tensors that have another error together."""
    return bound("factor * max(own, overall, u)", factor=factor, own=own, overall=overall, u=FP32_ROUNDOFF)


def clipping_bounds(gradients: Mapping[str, Tensor]) -> dict[str, Bound]:
    """Return the relative error of each clipped gradient, given those before.

    torch adds a little to the norm, see `TORCH_ADDS`, and other functions need not.
    """
    norm = total_norm(gradients.values(), order=2.0)
    return {
        name: bound("c + e / norm", c=error, e=TORCH_ADDS, norm=norm) if norm else error
        for name, error in tolerance.clipping(gradients, order=2.0).items()
    }


def _bounds(errors: OwnErrors, factor: float) -> dict[str, Bound]:
    return {name: measured_bound(factor, own, errors.overall) for name, own in errors.by_name.items()}


GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"
_FLOATING = ("float", "bfloat")


@dataclass(frozen=True)
class FsdpGroup:
    """Ranks with different data among which FSDP2 shards parameters, or reduces gradients of copies of shards."""

    name: str
    """Name of the group in the log of collectives."""
    ranks: tuple[int, ...]
    shard_numels: dict[str, int]
    """Elements of a shard, padded to the largest shard of any rank, by parameter; FSDP2 gathers and reduces these."""

    def numel(self, names: Iterable[str]) -> int:
        """Return the elements of the shards of some of the group's parameters."""
        return sum(self.shard_numels[name] for name in names if name in self.shard_numels)

    def numel_by_calls(self, names: Iterable[str], calls: Mapping[str, int], *, unseen: int) -> int:
        """Return the same, each parameter's as often as its module computes, or the number of times for unseen ones."""
        return sum(self.numel([name]) * calls.get(name, unseen) for name in names)


def fsdp_groups(record: SubjectRecord, rank: int) -> list[FsdpGroup]:
    """Return the groups in which FSDP2 shards parameters of a rank, as their modules compute with them gathered.

    Parameters that are sharded by other means, such as experts, are in none. Raises Unsupported if there is no group,
    which `fsdp-is-on` reports.
    """
    groups = _groups(record, rank, lambda parameter: parameter.fsdp_ranks)
    if not groups:
        raise Unsupported("FSDP2 shards no parameter over ranks with different data")
    return groups


def replica_groups(record: SubjectRecord, rank: int) -> list[FsdpGroup]:
    """Return the groups over which FSDP2 reduces gradients of a rank's shards, which other ranks hold copies of."""
    return _groups(record, rank, lambda parameter: parameter.fsdp_replica_ranks)


def _groups(
    record: SubjectRecord, rank: int, groups_of: Callable[[ShardedParameter], Sequence[Sequence[int]]]
) -> list[FsdpGroup]:
    by_ranks: dict[tuple[int, ...], dict[str, int]] = {}
    for name, parameter in record.ranks[rank].parameters.items():
        for ranks in _with_other_data(record, groups_of(parameter)):
            by_ranks.setdefault(ranks, {})[name] = _padded_numel(record, name, parameter)
    return [FsdpGroup(_name(ranks, record.world_size), ranks, numels) for ranks, numels in by_ranks.items()]


def _padded_numel(record: SubjectRecord, name: str, parameter: ShardedParameter) -> int:
    """Return the elements of the largest shard among the ranks that gather a parameter together."""
    sizes = [record.ranks[member].parameters[name].local_numel for ranks in parameter.fsdp_ranks for member in ranks]
    return max([*sizes, parameter.local_numel])


def _with_other_data(record: SubjectRecord, groups: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    data_ranks = [facts.data_rank for facts in record.ranks]
    return [tuple(ranks) for ranks in groups if len({data_ranks[rank] for rank in ranks}) > 1]


def _name(ranks: Sequence[int], world_size: int) -> str:
    return "world" if len(ranks) == world_size else f"ranks {','.join(map(str, ranks))}"


def members(group: str, world_size: int) -> list[int]:
    """Return the ranks of a group by its name in the log of collectives.

    >>> members("ranks 0,2", 4), members("world", 2)
    ([0, 2], [0, 1])
    """
    return [*range(world_size)] if group == "world" else [int(rank) for rank in group.removeprefix("ranks ").split(",")]


def shard_group_names(record: SubjectRecord, rank: int) -> list[str]:
    """Return the names of all groups of several ranks that shard a trained parameter of a rank, in any dimension."""
    trained = [parameter for parameter in record.ranks[rank].parameters.values() if parameter.is_trained]
    groups = {tuple(ranks) for parameter in trained for ranks in parameter.shard_ranks if len(ranks) > 1}
    return [_name(ranks, record.world_size) for ranks in sorted(groups)]


def fsdp_collectives(
    facts: SubjectFacts, group: FsdpGroup, kind: str, *, step: int, in_first_forward: bool = False
) -> list[Collective]:
    """Return the collectives of a kind that FSDP has issued over a group in a step, of floating numbers."""
    end = facts.first_backward[step] if in_first_forward else None
    chosen = [c for c in facts.collectives[:end] if (c.step, c.kind) == (step, kind) and c.dtype.startswith(_FLOATING)]
    return [c for c in chosen if c.is_of_fsdp and c.group == group.name and c.phase in ("forward", "backward")]


def unsharded_before(facts: SubjectFacts, step: int) -> list[str]:
    """Return the parameters that another turn has left gathered when a step begins, with the weights of the step."""
    prefix = f"step{step - 1}: "
    return [entry.removeprefix(prefix) for entry in facts.unsharded_for_others if entry.startswith(prefix)]


def gathers_between_steps(facts: SubjectFacts, group: FsdpGroup, *, step: int) -> list[Collective]:
    """Return the gathers of FSDP over a group between a step and the one before, with the weights of the step."""
    chosen = [c for c in facts.collectives if (c.step, c.kind) == (step - 1, GATHER) and c.phase in ("build", "idle")]
    return [c for c in chosen if c.is_of_fsdp and c.group == group.name and c.dtype.startswith(_FLOATING)]


def reductions(facts: SubjectFacts) -> list[str]:
    """Return the collectives that reduce gradients in backward: kind, dtype and operation, each once."""
    kinds = (REDUCE_SCATTER, ALL_REDUCE)
    chosen = [c for c in facts.collectives if c.phase == "backward" and c.kind in kinds]
    return sorted({f"{c.kind} {c.dtype} {c.reduce_op}" for c in chosen})
