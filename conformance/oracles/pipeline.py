"""Pipeline model: actions, transfers and gathers of each rank's stages in a step, in order.

Sources: GPipe arXiv:1811.06965 (all forwards, then all backwards); 1F1B arXiv:2006.09503 and its interleaved form
arXiv:2104.04473 section 2.2; looped BFS arXiv:2211.05953; zero bubble arXiv:2401.10241, sections 2 (ZB-H1) and 6 (ZB-V)
for a forward and the halves of a backward that take equally long. Nothing here asks torch or the trainer.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch

from conformance.oracles.dtype_policy import FP32, dtype_policy
from conformance.oracles.float8 import multiplied_in_float8
from conformance.oracles.outline import outline
from conformance.oracles.schedule import (
    Event,
    backward_count,
    entered,
    entered_backward,
    gather_input,
    groups,
    kept_after_forward,
)
from conformance.oracles.torch_versions import traits_of
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import ParallelDims

_ONE_STAGE = ("gpipe", "1f1b")
_SPLIT = ("interleaved-zero-bubble", "zbv-zero-bubble")


_LAYER = re.compile(r"\blayers\.(\d+)")
_FIRST, _LAST = re.compile(r"\btok_embeddings\b"), re.compile(r"(^|/)(norm|output|logits|loss)\b")
Thing = TypeVar("Thing")


class Action(NamedTuple):
    """Computation of a stage on a micro-batch."""

    kind: str
    """`forward`, `backward`, or the halves of backward: `backward-input` and `backward-weight`."""
    stage: int
    micro_batch: int


def owners(config: TrainerConfig) -> list[int]:
    """Return the rank of the pipeline that holds each stage."""
    pp = config.mesh.pp
    if has_one_stage(config):
        return list(range(pp))
    down = list(range(pp))
    return down + (down[::-1] if config.pipeline.schedule == "zbv-zero-bubble" else down)


def has_one_stage(config: TrainerConfig) -> bool:
    """Return whether each rank of the pipeline has one stage."""
    return config.pipeline.schedule in _ONE_STAGE


def stages_of(rank: int, config: TrainerConfig) -> list[int]:
    """Return the stages of a rank of the pipeline, in the order of the model."""
    return [stage for stage, owner in enumerate(owners(config)) if owner == rank]


def layers_of(stage: int, config: TrainerConfig) -> list[int]:
    """Return the layers of a stage: equally many in each, the remainder spread over the model."""
    count, layers = len(owners(config)), config.model.n_layers
    return list(range(layers * stage // count, layers * (stage + 1) // count))


def groups_of(stage: int, config: TrainerConfig) -> list[str]:
    """Return the FSDP groups of a stage in the order in which forward enters them."""
    names, layers = entered(groups(config)), layers_of(stage, config)
    inside = {f"layers.{layer}" for layer in layers}
    chosen = {name for name in names if ".".join(name.split(".")[:2]) in inside}
    chosen |= {"tok_embeddings"} if stage == 0 else set()
    chosen |= {"norm", "output"} & set(names) if stage == len(owners(config)) - 1 else set()
    return [name for name in names if name in chosen]


def held_by(rank: int, things: Mapping[str, Thing], config: TrainerConfig) -> dict[str, Thing]:
    """Keep the entries of pipeline rank `rank`; a key that names no stage belongs to all.

    Keys name parameters, buffers or modules, with or without a prefix: `module_input/layers.2.attention.wq`. Without a
    pipeline each rank has all entries.
    """
    own = [*stages_of(rank, config), None]
    return {thing: value for thing, value in things.items() if _stage_of(thing, config) in own}


def held_dtypes(rank: int, dtypes: Mapping[str, list[str]], config: TrainerConfig) -> dict[str, list[str]]:
    """Keep the dtypes of things of pipeline rank `rank`, see `held_by`.

    All products of a stage without the output layer may emulate float8, in fp32.
    """
    held, in_float8 = held_by(rank, dtypes, config), multiplied_in_float8(config)
    if config.mesh.pp == 1:
        return held
    weights = [name for name, weight in outline(config.model).named_parameters() if weight.ndim > 1]
    others = [name for name in held_by(rank, dict.fromkeys(weights), config) if name not in in_float8]
    if in_float8 and set(others) <= {"tok_embeddings.weight"}:
        held |= {thing: [FP32] for thing in held if thing.startswith("matmul/")}
    return held


def _stage_of(thing: str, config: TrainerConfig) -> int | None:
    """Return the stage with the parameter, buffer or module in a key; None if every rank has it."""
    stages = range(len(owners(config)))
    if match := _LAYER.search(thing):
        return next(stage for stage in stages if int(match[1]) in layers_of(stage, config))
    if _FIRST.search(thing):
        return stages[0]
    return stages[-1] if _LAST.search(thing) else None


def backward_kinds(config: TrainerConfig) -> tuple[str, ...]:
    """Return the actions that make up a backward."""
    return ("backward-input", "backward-weight") if config.pipeline.schedule in _SPLIT else ("backward",)


def order(config: TrainerConfig, *, rank: int) -> list[Action]:
    """Return the actions of a rank of the pipeline in their order."""
    own, micro_batches = stages_of(rank, config), range(config.accumulation)
    match config.pipeline.schedule:
        case "gpipe":
            return [Action(kind, own[0], index) for kind in ("forward", "backward") for index in micro_batches]
        case "1f1b":
            forwards, backwards = ([Action(kind, own[0], i) for i in micro_batches] for kind in ("forward", "backward"))
            return _one_by_one(forwards, backwards, ahead=config.mesh.pp - rank)
        case "interleaved-1f1b":
            return _interleaved(config, rank, hops=2)
        case "looped-bfs":
            forwards = [Action("forward", s, i) for s in own for i in micro_batches]
            return forwards + [Action("backward", s, i) for s in reversed(own) for i in reversed(micro_batches)]
        case "interleaved-zero-bubble":
            return list(_halved(_interleaved(config, rank, hops=1), behind=rank))
        case "zbv-zero-bubble":
            return _v_shaped(config, rank)


def _interleaved(config: TrainerConfig, rank: int, *, hops: int) -> list[Action]:
    """Return interleaved 1F1B, with `hops` more forwards before the first backward for each later rank."""
    own, pp = stages_of(rank, config), config.mesh.pp
    round_size = config.accumulation // max(1, config.accumulation // pp)
    batches = [range(start, start + round_size) for start in range(0, config.accumulation, round_size)]
    forwards = [Action("forward", s, i) for batch in batches for s in own for i in batch]
    backwards = [Action("backward", s, i) for batch in batches for s in reversed(own) for i in batch]
    # The forwards before the first backward (arXiv:2104.04473), and the one that alternates with it.
    return _one_by_one(forwards, backwards, ahead=(len(own) - 1) * round_size + hops * (pp - 1 - rank) + 1)


def _halved(actions: Sequence[Action], *, behind: int) -> Iterator[Action]:
    """Yield the actions with backwards in two halves; the second halves are `behind` the first."""
    waiting: list[Action] = []
    for action in actions:
        if action.kind == "forward":
            yield action
            continue
        yield action._replace(kind="backward-input")
        waiting.append(action._replace(kind="backward-weight"))
        if len(waiting) > behind:
            yield waiting.pop(0)
    yield from waiting


def _v_shaped(config: TrainerConfig, rank: int) -> list[Action]:
    """Return ZB-V, in which a rank has a stage on the way `down` and one on the way `up`.

    The schedule needs as many micro-batches as fill the pipeline; with fewer, the missing turns are left out.
    """
    pp, (down, up) = config.mesh.pp, stages_of(rank, config)
    forward_down, forward_up = ("forward", down), ("forward", up)
    halves_down, halves_up = ([(kind, stage) for kind in backward_kinds(config)] for stage in (down, up))
    turns = [forward_down] * (2 * (pp - rank) - 1) + [forward_up, forward_down] * rank
    turns += [forward_up, *halves_up] * (pp - rank)
    turns += [forward_down, *halves_down, forward_up, *halves_up] * (max(2 * pp - 1, config.accumulation) - pp)
    turns += [halves_down[0], halves_up[0]] * rank + halves_down * (pp - rank)
    turns += [halves_up[1]] * rank + [halves_down[1]] * rank
    done = Counter[tuple[str, int]]()
    actions = []
    for kind, stage in turns:
        actions.append(Action(kind, stage, done[kind, stage]))
        done[kind, stage] += 1
    return [action for action in actions if action.micro_batch < config.accumulation]


def _one_by_one(forwards: Sequence[Action], backwards: Sequence[Action], *, ahead: int) -> list[Action]:
    """Return `ahead` forwards, then a backward and a forward in turn, then the remaining backwards."""
    actions = [*forwards[:ahead]]
    following = iter(forwards[ahead:])
    for backward in backwards:
        actions += [backward, *(forward for forward in [next(following, None)] if forward)]
    return actions


def backward_order(config: TrainerConfig) -> list[int]:
    """Return the micro-batches in the order in which each stage adds up their gradients."""
    rising = list(range(config.accumulation))
    return rising[::-1] if config.mesh.pp > 1 and config.pipeline.schedule == "looped-bfs" else rising


def added_up_at_once(parameter: str, config: TrainerConfig) -> list[int]:
    """Return the numbers of consecutive micro-batches whose gradients of a parameter are added up as they are computed.

    FSDP sees gradients, which it keeps in the dtype of reductions, in the part of a backward that passes through the
    input of a group. The second half of a backward does not: it adds to the gradient of an earlier one, until the next
    first half or the reduction. The first stage, whose input has no gradient, computes a backward as a whole. Sources:
    `stage_backward_weight` in torch/distributed/pipelining/_backward.py; `FSDPParamGroup.post_backward`.
    """
    stage = _stage_of(parameter, config)
    if config.mesh.pp == 1 or config.pipeline.schedule not in _SPLIT or not stage:
        return [1] * backward_count(config)
    counts = [0]
    for action in order(config, rank=owners(config)[stage]):
        if action.stage == stage and action.kind == "backward-input":
            counts.append(0)
        counts[-1] += (action.stage, action.kind) == (stage, "backward-weight")
    return [count for count in counts if count]


def violations(actions: Sequence[Action], config: TrainerConfig, *, rank: int) -> list[str]:
    """Return the faults of a rank's order of actions: each must come once, and after the actions that it needs."""
    own = stages_of(rank, config)
    kinds = ("forward", *backward_kinds(config))
    wanted = Counter(Action(kind, s, i) for kind in kinds for s in own for i in range(config.accumulation))
    wrong = [f"{action}: {Counter(actions)[action]} times" for action in (wanted - Counter(actions))]
    wrong += [f"{action}: too often" for action in (Counter(actions) - wanted)]
    position = {action: index for index, action in enumerate(actions)}
    for action in wanted:
        needed = [Action(kind, action.stage, action.micro_batch) for kind in kinds[: kinds.index(action.kind)]]
        early = [other for other in needed if action in position and position[action] < position.get(other, 0)]
        wrong += [f"{action} before {other}" for other in early]
    return wrong


def transfers(actions: Iterable[Action], config: TrainerConfig) -> Counter[tuple[str, int]]:
    """Return the number of tensors that these actions of one rank receive and send, by direction and other rank."""
    rank_of, count = owners(config), Counter[tuple[str, int]]()
    last = len(rank_of) - 1
    for action in actions:
        if action.kind == "backward-weight":
            continue
        step = 1 if action.kind == "forward" else -1
        for direction, neighbour in (("recv", action.stage - step), ("send", action.stage + step)):
            if 0 <= neighbour <= last and rank_of[neighbour] != rank_of[action.stage]:
                count[direction, rank_of[neighbour]] += 1
    return count


def sends(actions: Iterable[Action], config: TrainerConfig) -> int:
    """Return the number of tensors that these actions of one rank send."""
    return sum(number for (direction, _), number in transfers(actions, config).items() if direction == "send")


def held(actions: Sequence[Action], stage: int, config: TrainerConfig) -> list[int]:
    """Return the micro-batches whose activations a stage needs after these actions, rising."""
    done = backward_kinds(config)[-1]
    forward = {a.micro_batch for a in actions if a.stage == stage and a.kind == "forward"}
    return sorted(forward - {a.micro_batch for a in actions if a.stage == stage and a.kind == done})


def activation_numel(config: TrainerConfig, dims: ParallelDims) -> int:
    """Return the elements of a rank's part of the activations of a micro-batch, as stages transfer them."""
    samples = config.data.global_batch_size // config.accumulation // dims.dp
    tokens = samples * config.data.seq_len // (dims.tp if config.sequence_parallel else 1)
    return tokens * config.model.dim


def received_numel(config: TrainerConfig, dims: ParallelDims, *, rank: int) -> int:
    """Return the elements of the buffers in which a rank receives activations and gradients of all micro-batches.

    Each stage has its buffers from the first step on (`args_recv_info` and `grad_recv_info` in
    torch/distributed/pipelining/stage.py).
    """
    last = len(owners(config)) - 1
    neighbours = sum((stage > 0) + (stage < last) for stage in stages_of(rank, config))
    return neighbours * config.accumulation * activation_numel(config, dims)


def sent_numel(config: TrainerConfig, dims: ParallelDims, *, rank: int) -> int:
    """Return the elements of all tensors that a rank sends to others in a step; 0 without a pipeline.

    A send holds its tensor until the schedule waits for it: up to torch 2.14, with several stages on each rank, at the
    end of the step (`_step_microbatches` of `_PipelineScheduleRuntime` in torch/distributed/pipelining/schedules.py).
    """
    if config.mesh.pp == 1:
        return 0
    return sends(order(config, rank=rank), config) * activation_numel(config, dims)


def kept_gradients_numel(config: TrainerConfig, dims: ParallelDims, *, rank: int) -> int:
    """Return the elements of the gradients that first halves of backwards leave at a rank's buffers in a step.

    See `VersionTraits.halves_keep_gradients`. A stage on the same rank has its gradients in place of a buffer.
    """
    if config.pipeline.schedule not in _SPLIT:
        return 0
    rank_of = owners(config)
    senders = sum(stage > 0 and rank_of[stage - 1] != rank for stage in stages_of(rank, config))
    return senders * config.accumulation * activation_numel(config, dims)


def most_held(config: TrainerConfig, *, rank: int) -> int | None:
    """Return the most micro-batches that a rank with one stage ever holds; None for ranks with several stages."""
    pp, micro_batches = config.mesh.pp, config.accumulation
    return {"gpipe": micro_batches, "1f1b": min(micro_batches, pp - rank)}.get(config.pipeline.schedule)


def gathers(actions: Sequence[Action], config: TrainerConfig) -> Counter[str]:
    """Return how often each group of a rank is gathered in a step, see `group_steps`."""
    return Counter(step.group for step in group_steps(actions, config) if step.kind == "gather")


class GroupStep(NamedTuple):
    """Gather of a group, or reduction of its gradients."""

    kind: Literal["gather", "reduce"]
    group: str
    phase: Literal["data", "forward", "backward"]


def gathers_ahead(config: TrainerConfig) -> bool:
    """Return whether a rank gathers the groups of its stages before its first action: if it has several.

    Source: `_add_unshard_reshard` in torch/distributed/pipelining/schedules.py, which gathers three stages ahead; a
    rank has two.
    """
    return config.mesh.pp > 1 and not has_one_stage(config)


def with_ends(actions: Sequence[Action], config: TrainerConfig) -> Iterator[tuple[Action, bool]]:
    """Yield the actions of a rank, each with True if it is the last backward of its stage."""
    to_come = Counter(action.stage for action in actions if action.kind == backward_kinds(config)[-1])
    for action in actions:
        is_backward = action.kind == backward_kinds(config)[-1]
        to_come[action.stage] -= is_backward
        yield action, is_backward and not to_come[action.stage]


def reduction_order(stage: int, config: TrainerConfig) -> list[str]:
    """Return the groups of a stage in the order in which they are reduced, after its last backward.

    See `VersionTraits.stages_finalize_backward`: inner groups come before the group around them then.
    """
    held = groups_of(stage, config)
    return held[::-1] if traits_of(str(torch.__version__)).stages_finalize_backward else held


def group_steps(actions: Sequence[Action], config: TrainerConfig) -> Iterator[GroupStep]:
    """Return the steps of a rank's groups in their order: gathers whenever an action finds a group sharded, reductions.

    `actions` are those of the rank, in their order. Forward shards groups again as the reshard mode says, backward does
    not: gradients stay unsharded until all micro-batches have added to them.
    """
    unsharded: set[str] = set()
    in_use = dict.fromkeys(action.stage for action in actions)
    for stage in in_use if gathers_ahead(config) else ():
        unsharded.update(groups_of(stage, config))
        yield from (GroupStep("gather", group, "data") for group in groups_of(stage, config))
    for action, ends_stage in with_ends(actions, config):
        inside = groups_of(action.stage, config)
        names = inside if action.kind == "forward" else entered_backward(groups(config))
        for group in filter(inside.__contains__, names):
            if group not in unsharded:
                yield GroupStep("gather", group, "forward" if action.kind == "forward" else "backward")
            unsharded.add(group)
            if action.kind == "forward" and not kept_after_forward(group, config):
                unsharded.discard(group)
        if ends_stage:
            yield from (GroupStep("reduce", group, "backward") for group in reduction_order(action.stage, config))


def fsdp_events(
    config: TrainerConfig, dims: ParallelDims, numels: Mapping[str, int], actions: Sequence[Action]
) -> list[Event]:
    """Return the collectives of FSDP on a rank of a pipeline in their order.

    `actions` are those of the rank, in their order; `numels` are the elements of shards, see `schedule.shard_numels`.
    """
    policy, events = dtype_policy(config.precision), list[Event]()
    for kind, group, phase in group_steps(actions, config):
        numel = numels[group]
        if kind == "gather" and dims.dp_shard > 1:
            during = group if phase == "forward" else ""
            sent = gather_input(group, numel, config, dims)
            events.append(Event(phase, "all_gather", "dp_shard", *sent, during=during))
        if kind == "reduce" and dims.dp_shard > 1:
            events.append(Event(phase, "reduce_scatter", "dp_shard", numel * dims.dp_shard, policy.reduce))
        if kind == "reduce" and dims.dp_replicate > 1:
            events.append(Event(phase, "all_reduce", "dp_replicate", numel, policy.reduce))
    return events


def fsdp_groups(config: TrainerConfig, dims: ParallelDims, actions: Sequence[Action]) -> list[str]:
    """Return the group of each collective of `fsdp_events`, in the same order."""
    collectives = {"gather": dims.dp_shard > 1, "reduce": (dims.dp_shard > 1) + (dims.dp_replicate > 1)}
    return [step.group for step in group_steps(actions, config) for _ in range(collectives[step.kind])]
