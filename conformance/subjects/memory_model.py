"""Model of a trainer's memory in each phase of a step, from FSDP2's groups and the activations of one process.

All bytes are of one rank and above those that it holds before the step. FSDP2's buffers are those of
torch/distributed/fsdp/_fully_shard: the output of an all-gather, the unsharded parameters that are copied out of it,
the unsharded gradients, the input of a reduce-scatter and its output.

- Activations: those of one process for the same micro-batch, in the dtype of the cell, under the same ledger; under
  torch's autocast in bf16 where FSDP2 does not cast the parameters. Of a
  model that one process cannot cast as FSDP2 does, each tensor is there in bf16, in fp32, or in both: at most 3/2 of
  those in fp32. Where ranks exchange samples (all-to-all, as for experts) a rank may be given those of all ranks.
- With tensor parallelism a rank holds what autograd saves in its own run, whose sizes are those of its layout: a fault
  that keeps other tensors adds nothing to it. Every other tensor of one process is there whole, as one of two ranks'
  half, or as both (a redistribution): at most 3/2. Together they are no more than 3/2 of one process's.
- A group that is resharded after forward is unsharded while it computes, with the groups around it. Buffers of two
  all-gathers are there besides, the previous one's and its own, and of as many as it was told to gather ahead.
- In backward FSDP2 gathers one group ahead by itself, of those that were resharded. The gradients of a group wait for
  all of the group: of a group around others until these are done, and of one that is fed with data until backward
  ends, as its parameters. The inputs of two reduce-scatters are there, the previous one's and its own, and one output.
  Groups that are fed with data reduce when backward has ended. Then activations are there only if the graph is kept.
- In a step of several micro-batches all groups may stay unsharded, and all gradients may wait unsharded for the last.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest

import msgspec
import torch

from conformance.instruments.fsdp_state import GroupSettings
from conformance.outcomes import Unsupported
from conformance.subjects.evidence import (
    GATHER,
    Evidence,
    fsdp_groups,
    gathers_between_steps,
    members,
    unsharded_before,
)
from conformance.subjects.facts import ActivationMemory, AllocatorFacts, ShardedParameter, SubjectFacts

NUMBERS_BYTES = 64
"""Bytes of the numbers that a step may leave: a loss, a norm, a count and others, eight in fp64."""
_THREADS = 2
"""Threads of a process group of gloo."""
_OPTIMIZER_COPIES = 3
"""Temporary copies of the shards that an optimizer's step may need: Adam with `foreach` needs a gradient with weight
decay, a denominator, and an update."""
_NAMED = 3
"""Copies of the model's outputs that variables of a trainer's own loop may name while the next phases run: the outputs,
a cast of them, and a shifted copy."""
_BOTH = 1.5
"""Bytes of a tensor in two dtypes, or in two layouts, relative to its bytes in one process."""


@dataclass(frozen=True)
class PhaseRoom:
    """Bytes that a rank may hold in one phase of a step."""

    phase: str
    start_bytes: int
    """When the phase begins, in any of its micro-batches."""
    peak_bytes: int


def rooms(evidence: Evidence, facts: SubjectFacts, memory: AllocatorFacts, step: int) -> Iterator[PhaseRoom]:
    """Yield the room of a rank in the phases of a step that end with something else than they began with.

    Raises Unsupported for a trainer without groups of FSDP2.
    """
    if not facts.groups:
        raise Unsupported("FSDP2 has made no group of parameters")
    buffers, own = _Buffers(evidence, facts, step), _Own(evidence, facts, memory, step)
    names = [group.name for group in fsdp_groups(evidence.record, facts.rank)]
    others = own.fixed_bytes + own.left_bytes + other_models_bytes(evidence, facts, step)
    in_flight = in_flight_bytes(evidence, facts, besides=names)  # the buffers have those of FSDP's groups
    forward = others + buffers.kept_bytes + buffers.waiting_bytes + (own.gradient_bytes if buffers.accumulates else 0)
    gathered = gathered_ahead_bytes(evidence, facts, step)
    ahead = forward + sum(gathered) + max(gathered, default=0)  # and one all-gather's output
    yield PhaseRoom("forward", ahead, ahead + own.forward_bytes + buffers.forward() + in_flight)
    backward = forward + own.gradient_bytes + buffers.replicated_bytes
    most = max(own.backward_bytes + buffers.backward(), own.held_bytes + buffers.end_of_backward())
    yield PhaseRoom("backward", forward + own.held_bytes, backward + most + in_flight)
    left = {*unsharded_before(facts, step + 1)}  # by a network of another turn, whose root stays as it has computed
    clip = others + own.gradient_bytes + sum(g.unsharded_bytes for g in facts.groups if left & {*g.names})
    yield PhaseRoom("clip", clip, clip + own.trained_bytes + in_flight)
    state = _OPTIMIZER_COPIES * own.trained_bytes + own.state_bytes + _full_tensors_bytes(evidence, facts, step)
    yield PhaseRoom("optimizer", clip, clip + state + in_flight)


def _full_tensors_bytes(evidence: Evidence, facts: SubjectFacts, step: int) -> int:
    """Return the bytes for an optimizer that gathers tensors to compute with them, as Muon and Shampoo do.

    They are those of a step in one process, beside the output of a gather, and the full tensor made of it.
    """
    known = evidence.reference.facts
    issued = [each for each in facts.collectives if (each.step, each.phase) == (step, "optimizer")]
    if not any(each.numel > len(known.parameters) for each in issued):
        return 0
    largest = max(math.prod(each.shape) * _itemsize(each) for each in facts.parameters.values() if each.is_trained)
    return known.optimizer_bytes + 2 * largest


def gathered_ahead_bytes(evidence: Evidence, facts: SubjectFacts, step: int) -> list[int]:
    """Return the bytes of each result that FSDP2 has gathered before forward, as by `unshard`."""
    return [
        entry.nbytes * len(group.ranks)
        for group in fsdp_groups(evidence.record, facts.rank)
        for entry in gathers_between_steps(facts, group, step=step)
    ]


def other_models_bytes(evidence: Evidence, facts: SubjectFacts, step: int) -> int:
    """Return the bytes that FSDP2 gathers in a step for models beside the one that is trained, such as a teacher.

    All their groups may be gathered at once, before the step is told to begin, and their root stays so. Their outputs
    are there, too, as large as those of the model that is trained.
    """
    gathers = [each for each in facts.collectives if each.step in (step - 1, step) and each.kind == GATHER]
    size = evidence.cell.world_size
    sizes = [each.nbytes * len(members(each.group, size)) for each in gathers if each.is_of_other_model]
    outputs = _NAMED * _activations(evidence, facts, max(step, 0)).output_bytes
    return sum(sizes) + max(sizes) + outputs if sizes else 0


def in_flight_bytes(evidence: Evidence, facts: SubjectFacts, *, besides: Collection[str] = ()) -> int:
    """Return the bytes that threads of gloo may hold a little longer; 0 on accelerators, where the host waits for them.

    Each process group has two threads, each of which may hold the tensors of its last operator. `besides` are names of
    groups to leave out.
    """
    if evidence.cell.device != "cpu":
        return 0
    largest: dict[str, int] = {}
    for entry in facts.collectives:
        ranks = evidence.cell.world_size if entry.group == "world" else entry.group.count(",") + 1
        copies = 1 + ranks if entry.kind == GATHER else 2
        largest[entry.group] = max(largest.get(entry.group, 0), copies * entry.nbytes)
    return sum(_THREADS * nbytes for group, nbytes in largest.items() if group not in besides)


class _Own:
    """Memory of a trainer that is not FSDP's."""

    def __init__(self, evidence: Evidence, facts: SubjectFacts, memory: AllocatorFacts, step: int) -> None:
        held = {each.step: each.known_bytes for each in memory.held}
        before, after = held[step - 1], held[step]
        activations = _activations(evidence, facts, step)
        on_device = evidence.cell.device != "cpu"
        casts_bytes = _casts_of_buffers_bytes(evidence, facts, before)
        self.forward_bytes = activations.forward_bytes + casts_bytes
        self.held_bytes = activations.held_bytes + casts_bytes
        self.backward_bytes = activations.backward_bytes + casts_bytes
        self.left_bytes = _NAMED * activations.output_bytes if facts.is_own_loop else 0
        kept = max(after["buffers"] - before["buffers"], 0)  # such as a mask that is made by the first step
        # A device has the batch of a step, and so has the host if a loop copies it: joined, split, or in another order.
        batch_bytes = facts.batch_bytes if on_device or facts.is_own_loop else 0
        self.fixed_bytes = NUMBERS_BYTES * (step + 2) + kept + batch_bytes
        sharded = sum(group.trained_shard_bytes for group in facts.groups)
        ignored = sum(shard_bytes(each) for each in facts.parameters.values() if each.is_ignored and each.is_trained)
        self.trained_bytes = sharded + ignored
        gradients = ignored if evidence.cell.offload and on_device else self.trained_bytes
        self.gradient_bytes = max(gradients - before["gradients"], 0)
        self.state_bytes = max(after["optimizer"] - before["optimizer"], 0)


def shard_bytes(parameter: ShardedParameter) -> int:
    """Return the bytes of a rank's shard of a parameter that FSDP2 leaves alone."""
    return parameter.local_numel * _itemsize(parameter)


def full_bytes(parameter: ShardedParameter) -> int:
    """Return the bytes of a full parameter."""
    return math.prod(parameter.shape) * _itemsize(parameter)


def _itemsize(parameter: ShardedParameter) -> int:
    dtype: torch.dtype = getattr(torch, parameter.dtype)
    return dtype.itemsize


def _casts_of_buffers_bytes(evidence: Evidence, facts: SubjectFacts, known_bytes: Mapping[str, int]) -> int:
    """Return the bytes for copies in bf16 of tables that a model hands to its blocks, such as those of RoPE.

    FSDP2 casts inputs where a group begins, each of which then has a copy; one process computes with the buffer itself.
    """
    if evidence.cell.precision != "bf16" or not _gathers(facts, "bfloat16"):
        return 0
    return len(facts.groups) * known_bytes["tables"] // 2


def _activations(evidence: Evidence, facts: SubjectFacts, step: int) -> ActivationMemory:
    """Return the activations that a rank may hold for a micro-batch of a step.

    A run in bf16 in which FSDP2 casts no parameters is torch's autocast's. Where it keeps some groups in fp32, code
    that follows the dtype of their weights has activations in fp32, beside their casts.
    """
    known, in_bf16 = evidence.reference.facts, evidence.cell.precision == "bf16"
    exchanged = any(entry.kind == "all_to_all" for entry in facts.collectives)
    samples = evidence.cell.world_size if exchanged else 1
    if in_bf16 and not _gathers(facts, "bfloat16"):
        alone = _scaled(known.autocast_activations[facts.data_rank], samples)
    elif in_bf16 and known.bf16_activations and not _gathers(facts, "float32"):
        alone = _scaled(known.bf16_activations[facts.data_rank], samples)
    else:
        alone = _scaled(known.activations[facts.data_rank], samples * (_BOTH if in_bf16 else 1.0))
    return _on_one_rank(alone, facts.saved_bytes[step]) if "tp" in evidence.cell.shape else alone


def _gathers(facts: SubjectFacts, dtype: str) -> bool:
    """Return whether FSDP2 gathers parameters in a dtype."""
    return any(entry.is_of_fsdp and (entry.kind, entry.dtype) == (GATHER, dtype) for entry in facts.collectives)


def _on_one_rank(alone: ActivationMemory, saved_bytes: int) -> ActivationMemory:
    """Return the activations of a tensor-parallel rank, which has saved some, by those of one process."""
    most = _scaled(alone, _BOTH)
    held_bytes = saved_bytes + round(_BOTH * (alone.held_bytes - alone.saved_bytes))
    return msgspec.structs.replace(
        most,
        forward_bytes=min(most.forward_bytes, saved_bytes + most.others_in_forward_bytes),
        held_bytes=min(most.held_bytes, held_bytes),
        backward_bytes=min(most.backward_bytes, saved_bytes + most.others_in_backward_bytes),
        output_bytes=alone.output_bytes,  # a variable names one layout, which is whole at most
    )


def _scaled(activations: ActivationMemory, factor: float) -> ActivationMemory:
    return ActivationMemory(
        **{name: round(factor * nbytes) for name, nbytes in msgspec.structs.asdict(activations).items()}
    )


class _Buffers:
    """Buffers of FSDP2 on a rank in a step."""

    def __init__(self, evidence: Evidence, facts: SubjectFacts, step: int) -> None:
        self._groups = facts.groups
        self._fed = [group for group in facts.groups if set(group.modules) & set(facts.fed_with_data)]
        self._ahead = max(group.prefetched for group in facts.groups)
        casts = evidence.cell.precision == "bf16" or evidence.cell.offload
        self._cast_bytes = max(group.shard_bytes for group in facts.groups) if casts else 0
        in_columns = {name for name, each in facts.parameters.items() if not each.is_cut_in_rows}
        self._ordered_bytes = max((g.unsharded_bytes for g in facts.groups if in_columns & {*g.names}), default=0)
        """Parameters that are gathered in columns are copied once more, into rows."""
        self._calls = max(facts.calls[step].first.values(), default=1)
        self.accumulates = evidence.cell.accumulation[step] > 1
        unsharded = sum(group.unsharded_bytes for group in facts.groups)
        self.kept_bytes = unsharded if self.accumulates else sum(group.kept_bytes for group in facts.groups)
        self.waiting_bytes = sum(group.reduced_bytes for group in facts.groups) if self.accumulates else 0
        is_replicated = "dp_replicate" in evidence.cell.shape
        self.replicated_bytes = sum(g.reduced_bytes // g.ranks for g in facts.groups) if is_replicated else 0
        """Outputs of reduce-scatters, which FSDP2 keeps until the all-reduces of backward have ended."""

    def forward(self) -> int:
        """Return the bytes that are needed at once in forward, above those of the groups that stay unsharded."""
        computing = max(sum(map(self._resharded, self._with_outer(group))) for group in self._groups)
        return computing + self._gathered(2 + self._ahead) + self._cast_bytes + self._ordered_bytes

    def backward(self) -> int:
        """Return the same in backward, until gradients of all activations are there."""
        reducing = [group for group in self._groups if group not in self._fed]
        computing = max(sum(map(self._in_backward, self._at_once(group))) for group in self._groups)
        gathered = self._gathered(1 + max(1, self._ahead), backward=True) + self._cast_bytes + self._ordered_bytes
        return computing + gathered + _reducing(reducing)

    def end_of_backward(self) -> int:
        """Return the same when the groups that are fed with data reduce."""
        return sum(map(self._in_backward, self._fed)) + _reducing(self._groups)

    def _at_once(self, group: GroupSettings) -> list[GroupSettings]:
        """Return a group, those around it and those that wait until backward ends, each once."""
        around = self._with_outer(group)
        return [each for each in self._groups if each in around or each in self._fed]

    def _resharded(self, group: GroupSettings) -> int:
        return max(group.unsharded_bytes - group.kept_bytes, 0)

    def _in_backward(self, group: GroupSettings) -> int:
        return self._resharded(group) + group.computed_bytes

    def _gathered(self, count: int, *, backward: bool = False) -> int:
        """Return the bytes of gathers that follow each other; one group may be gathered each time that it computes.

        In backward those are not gathered that have stayed unsharded.
        """
        gathered = [group for group in self._groups if not backward or self._resharded(group)]
        return sum(nlargest(count, [group.unsharded_bytes for group in gathered for _ in range(self._calls)]))

    def _with_outer(self, group: GroupSettings) -> list[GroupSettings]:
        """Return a group and those around it."""
        return [each for each in self._groups if each is group or _is_around(each.modules, group.modules)]


def _reducing(groups: Sequence[GroupSettings]) -> int:
    """Return the bytes that groups need to reduce gradients one after the other: two inputs and one output."""
    inputs = nlargest(2, (group.reduced_bytes for group in groups))
    return sum(inputs) + max((group.reduced_bytes // group.ranks for group in groups), default=0)


def _is_around(outer: Sequence[str], inner: Iterable[str]) -> bool:
    return any(not path or each.startswith(f"{path}.") for each in inner for path in outer)
