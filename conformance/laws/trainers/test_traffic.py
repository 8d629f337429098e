"""Laws of any trainer about collectives: the least and the most that its groups of ranks must issue.

Sizes come from the layouts of parameters, not from a configuration: FSDP2 gathers and reduces each shard padded to the
largest of its group (`foreach_all_gather` and `foreach_reduce` in torch/distributed/fsdp/_fully_shard). How much tensor
parallelism communicates depends on the model. Judged is what it could have done without, whatever the model.
"""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import get_args

from conformance.assertions import compare
from conformance.instruments.collective_use import Waste
from conformance.instruments.facts import Collective
from conformance.judge.law import law
from conformance.outcomes import Unsupported
from conformance.subjects.evidence import (
    ALL_REDUCE,
    GATHER,
    REDUCE_SCATTER,
    Evidence,
    FsdpGroup,
    fsdp_collectives,
    fsdp_groups,
    gathers_between_steps,
    members,
    replica_groups,
    shard_group_names,
    unsharded_before,
)
from conformance.subjects.facts import SubjectFacts

FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
_NORMS = (ALL_REDUCE, GATHER, REDUCE_SCATTER)
_SYMMETRIC = (*_NORMS, "broadcast")
"""Collectives to which every rank contributes as much; from `scatter`, for one, only its source gives anything."""


@law("parameters-are-gathered", of="any trainer", like="RS-1", where="world > 1", reference=FULLY_SHARD)
def test_every_parameter_is_gathered(evidence: Evidence) -> None:
    """Before the first backward pass of a step ranks MUST gather every parameter that FSDP2 shards, whose module
    computes by then, and in the whole step each parameter that gets a gradient in one process, or whose module
    computes: at most once for each time that it does, forward and backward.

    Wrong if a group is gathered twice, or keeps parameters that the optimizer has changed since. Parameters that FSDP2
    does not shard, as experts that each rank has some of, are not gathered. What is gathered since the optimizer has
    stepped, as by an evaluation, which leaves the root unsharded, may be used, and so may a network that another turn
    has computed without gradients.

    Where optimizers take turns, parameters that get no gradient in a turn are gathered forward alone, and one group
    more for each turn, see `_ahead`.
    """
    for facts, group, step in _everywhere(evidence):
        trained, calls, ahead = _trained(evidence, step), facts.calls[step], _ahead(evidence, facts, group)
        unseen = {*trained} - calls.total.keys()
        least = group.numel({*calls.first, *unseen})
        most = group.numel_by_calls(group.shard_numels, calls.first, unseen=1)
        first = fsdp_collectives(facts, group, GATHER, step=step, in_first_forward=True)
        before = _numel(gathers_between_steps(facts, group, step=step)) + group.numel(unsharded_before(facts, step))
        least -= min(before, least)
        name, detail = "elements gathered before backward", f"rank {facts.rank}, step {step}, over {group.name}"
        compare.between(_numel(first), least, most, name=name, detail=detail, unit="elements of shards")
        least = group.numel({*trained, *calls.total})
        least -= min(before, least)
        backward = group.shard_numels if not ahead else [*trained, *_by_products(evidence, step)]
        passes = evidence.cell.accumulation[step]
        most = sum(group.numel_by_calls(each, calls.total, unseen=passes) for each in (group.shard_numels, backward))
        most += ahead
        name = "elements gathered in a step"
        gathered = _numel(fsdp_collectives(facts, group, GATHER, step=step))
        compare.between(gathered, least, most, name=name, detail=detail, unit="elements of shards")


@law("gradients-are-reduced", of="any trainer", like="MP-4", where="world > 1", reference=FULLY_SHARD)
def test_every_gradient_is_reduced(evidence: Evidence) -> None:
    """In every step ranks MUST reduce the gradients of all parameters that FSDP2 shards and that get one in one process
    equally often: after the step's last backward pass, or after each; first over the ranks that shard a parameter, then
    over those that hold copies.

    Wrong if a parameter is left out, or is reduced twice. Gradients of other parameters are the trainer's to reduce,
    which `gradients` judges.
    """
    for facts, kind, group, step in _reductions(evidence):
        trained, passes = _trained(evidence, step), evidence.cell.accumulation[step]
        factor = len(group.ranks) if kind == REDUCE_SCATTER else 1
        once = group.numel(trained)
        most = group.numel_by_calls([*trained, *_by_products(evidence, step)], facts.calls[step].total, unseen=passes)
        reduced = _numel(fsdp_collectives(facts, group, kind, step=step))
        detail, name = f"rank {facts.rank}, step {step}, over {group.name}", f"elements in {kind}"
        compare.between(reduced, factor * once, factor * most, name=name, detail=detail, unit="elements")
        if most == passes * once > 0:
            name = f"elements in {kind} beyond a multiple of all"
            compare.count(reduced % (factor * once), name=name, expected=0, detail=detail, unit="elements")


@law("wire-dtypes", of="any trainer", like="MP-1", where="world > 1", reference=FULLY_SHARD)
def test_dtypes_on_the_wire_stay(evidence: Evidence) -> None:
    """FSDP's collectives MUST have the dtypes and reductions of the first step in every step, and in fp32 be in fp32.

    Wrong if gradients are reduced in another dtype after the first step, or in 16 bits where nobody asks for them.
    """
    first: dict[tuple[int, str, str], set[str]] = {}
    gathers = ((facts, GATHER, group, step) for facts, group, step in _everywhere(evidence))
    for facts, kind, group, step in chain(gathers, _reductions(evidence)):
        issued = fsdp_collectives(facts, group, kind, step=step)
        spelled = {f"{c.kind} in {c.dtype}" + (f", {c.reduce_op}" if c.reduce_op else "") for c in issued}
        expected = first.setdefault((facts.rank, kind, group.name), spelled)
        other = sorted(spelled - expected)
        if evidence.cell.precision == "fp32":
            other += sorted({f"{c.kind} in {c.dtype}" for c in issued if c.dtype != "float32"})
        detail = f"rank {facts.rank}, step {step}: {', '.join(other)}"
        compare.count(len(other), name="other dtypes or reductions", expected=0, detail=detail, unit="kinds")


@law("same-collectives", of="any trainer", like="RS-1", where="world > 1", reference=FULLY_SHARD)
def test_ranks_issue_the_same_collectives(evidence: Evidence) -> None:
    """The ranks of each process group MUST issue the same collectives in the same order: of the same kind, and where
    all contribute equally of the same size, dtype and reduction.

    Wrong if a rank decides from its own data whether to communicate: runs hang, or add up what is no sum.
    """
    by_group: dict[str, dict[int, list[str]]] = {}
    for facts in evidence.record.ranks:
        for entry in facts.collectives:
            text = _spelled(entry) if entry.kind in _SYMMETRIC else entry.kind
            by_group.setdefault(entry.group, {}).setdefault(facts.rank, []).append(text)
    for group, by_rank in by_group.items():
        first_rank, expected = next(iter(by_rank.items()))
        for rank, issued in by_rank.items():
            differing = [pair for pair in zip(expected, issued, strict=False) if pair[0] != pair[1]]
            wrong = len(differing) + abs(len(expected) - len(issued))
            detail = f"over {group}: rank {first_rank} and rank {rank} issue {differing[:1] or 'other numbers'}"
            compare.count(wrong, name="different collectives", expected=0, detail=detail, unit="collectives")


@law(
    "no-needless-collectives",
    of="any trainer",
    like="TP-1",
    where="tp > 1",
    reference="https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html",
)
def test_nothing_is_sent_that_ranks_have(evidence: Evidence) -> None:
    """Ranks that see the same data, as those of tensor parallelism, MUST NOT gather elements that all of them have: a
    tensor whose gathered form is there unchanged, or a piece of a gathered or reduced result. Each MUST NOT read its
    own share alone of what it gathers (it had that before), or of what it reduces (a reduce-scatter has that).

    Wrong if projections of one input gather it one by one, or a layout goes back and forth between two modules.

    Leaving such a collective out needs neither more memory nor more work, whatever the model. A tensor that is
    gathered again after its result was freed is a choice, as in backward, and so is a weight that is gathered whole:
    for few weights and many tokens that sends less. Only what all ranks could leave out counts: once, however many
    groups issue it. Statistics, of fewer than two dimensions, may be read in any way.
    """
    ranks = evidence.record.ranks
    if any(facts.is_compiled for facts in ranks):
        raise Unsupported("compiled graphs read the results of collectives unseen")
    by_place: dict[tuple[Waste, int, str], list[str]] = {}
    seen = Counter(place for facts in ranks for place in _needless(facts))
    for (group, number, waste), times in sorted(seen.items()):
        sharing = members(group, evidence.record.world_size)
        if times == len(sharing) and len({ranks[rank].data_rank for rank in sharing}) == 1:
            issued = [each for each in ranks[sharing[0]].collectives if each.group == group]
            by_place.setdefault((waste, number, _spelled(issued[number])), []).append(group)
    by_waste: dict[str, list[str]] = {waste: [] for waste in get_args(Waste)}
    for (waste, _, spelled), groups in sorted(by_place.items()):
        by_waste[waste].append(f"{spelled} over {' and '.join(groups)}")
    counts = {waste: len(found) for waste, found in by_waste.items()}
    details = {waste: "; ".join(found[:3]) for waste, found in by_waste.items()}
    compare.none(counts, details=details, unit="collectives")


def _needless(facts: SubjectFacts) -> set[tuple[str, int, Waste]]:
    """Return the needless collectives of a rank by their group, and their position among those of the group."""
    found = set()
    for each in facts.needless:
        group = facts.collectives[each.number].group
        number = sum(entry.group == group for entry in facts.collectives[: each.number])
        found.add((group, number, each.waste))
    return found


@law("clipping-reduces-norms", of="any trainer", like="CLIP-5", where="world > 1", reference=FULLY_SHARD)
def test_clipping_communicates_norms_alone(evidence: Evidence) -> None:
    """Clipping MUST reduce norms over every group of ranks that shards gradients, and MUST NOT gather gradients.

    Wrong if it takes a rank's own norm for that of all, or needs the memory of full gradients. A loop that is declared
    not to clip reduces none.
    """
    known = evidence.reference.facts
    numbers, clips = len(known.parameters) + len(known.aliases), known.max_norm < math.inf
    for facts in evidence.record.ranks:
        groups = shard_group_names(evidence.record, facts.rank) if clips else []
        for step in evidence.steps:
            issued = [c for c in facts.collectives if c.step == step and c.phase == "clip" and c.kind in _NORMS]
            over = {c.group for c in issued}
            missing = [group for group in groups if group not in over and "world" not in over]
            large = [_spelled(c) for c in issued if c.numel > numbers]
            where = f"rank {facts.rank}, step {step}"
            details = {"groups without a norm": ", ".join(missing), "larger than norms": ", ".join(large[:3])}
            counts = {"groups without a norm": len(missing), "larger than norms": len(large)}
            compare.none(counts, details={name: f"{where}: {text}" for name, text in details.items()}, unit="seen")


@law("resharded", of="any trainer", like="RS-1", where="world > 1", reference=FULLY_SHARD)
def test_parameters_are_sharded_when_the_optimizer_steps(evidence: Evidence) -> None:
    """When the optimizer steps, every parameter MUST be sharded as it was when the model was built.

    Wrong if a group stays unsharded: the next forward pass computes with weights from before the step.
    """
    for facts in evidence.record.ranks:
        detail = f"rank {facts.rank}, {', '.join(facts.unsharded[:3])}"
        name = "parameters with another layout"
        compare.count(len(facts.unsharded), name=name, expected=0, detail=detail, unit="parameters")


def _everywhere(evidence: Evidence) -> Iterator[tuple[SubjectFacts, FsdpGroup, int]]:
    for facts in evidence.record.ranks:
        for group in fsdp_groups(evidence.record, facts.rank):
            for step in evidence.steps:
                yield facts, group, step


def _ahead(evidence: Evidence, facts: SubjectFacts, group: FsdpGroup) -> int:
    """Return the elements that FSDP2 may gather ahead and never use in a step, where optimizers take turns.

    A turn may compute another turn's network without gradients, as a generator whose samples are data. FSDP2 keeps the
    order of these calls until the next backward pass through that network, in which each group gathers the one that
    has computed before it (`_backward_prefetch` in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py). So the
    first group of a pass gathers the last one of the calls without gradients, and the pass's end drops it: one group
    of each network.
    """
    turns = evidence.reference.facts.turns
    if turns == 1:
        return 0
    return turns * max((group.numel(each.names) for each in facts.groups), default=group.numel(group.shard_numels))


def _reductions(evidence: Evidence) -> Iterator[tuple[SubjectFacts, str, FsdpGroup, int]]:
    """Yield all places of reductions: the rank, the kind of collective, its group, and the step."""
    for facts, group, step in _everywhere(evidence):
        yield facts, REDUCE_SCATTER, group, step
    for facts in evidence.record.ranks:
        for group in replica_groups(evidence.record, facts.rank):
            for step in evidence.steps:
                yield facts, ALL_REDUCE, group, step


def _trained(evidence: Evidence, step: int) -> list[str]:
    return [*evidence.reference.facts.gradients[step].by_name]


def _by_products(evidence: Evidence, step: int) -> list[str]:
    """Return parameters that get a gradient although the optimizer of another turn steps, as in a GAN."""
    known = evidence.reference.facts.by_products
    return known[step] if known else []


def _numel(collectives: list[Collective]) -> int:
    return sum(entry.numel for entry in collectives)


def _spelled(entry: Collective) -> str:
    operation = f" {entry.reduce_op}" if entry.reduce_op else ""
    return f"{entry.kind}{operation} of {entry.numel} {entry.dtype} in {entry.phase} of step {entry.step}"
