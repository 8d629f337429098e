"""Schedule model: the collectives that FSDP2 issues in one optimizer step, their order and their sizes.

Sources: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_state.py (unshard in pre-forward and
pre-backward, then of the groups that are prefetched, by default none in forward and one in backward; reduce-scatter in
post-backward); the public contract is in the docstrings of `fully_shard` and `FSDPModule`.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import msgspec
import torch

from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.float8 import FLOAT8, gathered_in_float8
from conformance.oracles.frozen import is_trained, trained
from conformance.oracles.outline import outline
from conformance.oracles.skipped import is_computed
from conformance.oracles.torch_versions import traits_of
from reference_trainer.config import GradientSync, TrainerConfig
from reference_trainer.parallel_dims import ParallelDims

Shapes = Mapping[str, Sequence[int]]
"""Shapes that FSDP shards, by parameter."""
_EMBEDDING, _NORM, _OUTPUT, _EXPERTS = "tok_embeddings", "norm", "output", "feed_forward.experts"


Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


class Event(msgspec.Struct, frozen=True):
    """Predicted collective of one rank; fields are those of `instruments.facts.Collective`."""

    phase: str
    kind: Kind
    group: str
    """Mesh dimension whose ranks take part; `dp_shard/2` for two of its ranks; `world`."""
    numel: int
    """Elements of this rank's input."""
    dtype: str
    reduce_op: str | None = None
    """`SUM`, `MAX`, ... where the model knows the operation."""
    during: str = ""
    """In forward and evaluation, for collectives of FSDP: the group that was entered last."""
    is_of_ring: bool = False
    """True for ring attention, whose groups may be those of FSDP."""

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's input."""
        return self.numel * int(getattr(torch, self.dtype).itemsize)


@dataclass(frozen=True)
class Group:
    """FSDP group: parameters that are gathered and reduced together."""

    name: str
    """Module that the group is named after."""
    inner: "tuple[Group, ...]" = ()
    """Groups whose modules run inside of this group's module, in their order."""


def groups(config: TrainerConfig) -> tuple[Group, ...]:
    """Return the groups in forward order: the embedding, each block, norm and output together.

    Masters of two dtypes (`bf16-mixed`) put each norm into a separate group. A tied weight, or `grouping` blocks, makes
    a single group of embedding, norm and output, which runs from the first to the last module. Experts that are divided
    among ranks are a group inside of their block's.
    """
    norms = ("attention_norm", "ffn_norm") if _norms_are_groups(config) else ()
    blocks = [f"layers.{i}" for i in range(config.model.n_layers)]
    inside = (*norms, _EXPERTS) if config.mesh.ep > 1 else norms
    middle = tuple(Group(block, tuple(Group(f"{block}.{group}") for group in inside)) for block in blocks)
    if norms:
        middle += (Group(_NORM),)
    if spans_model(config):
        return (Group(_OUTPUT, middle),)
    return (Group(_EMBEDDING), *middle, Group(_OUTPUT))


def spans_model(config: TrainerConfig) -> bool:
    """Return whether one group has embedding and output, and runs from the first to the last module."""
    return config.model.tied_embeddings or config.grouping == "blocks"


def group_of(parameter: str, config: TrainerConfig) -> str:
    """Return the name of the group that a parameter belongs to."""
    module = parameter.rpartition(".")[0]
    if module.startswith("layers."):
        block = ".".join(module.split(".")[:2])
        if _is_of_experts(module, config):
            return f"{block}.{_EXPERTS}"
        return module if _norms_are_groups(config) and module.endswith("_norm") else block
    if (module == _EMBEDDING and not spans_model(config)) or (module == _NORM and _norms_are_groups(config)):
        return module
    return _OUTPUT


def present(among: Iterable[Group], names: Collection[str]) -> tuple[Group, ...]:
    """Return the groups with these names; of some blocks that have no experts one group is missing."""
    return tuple(Group(group.name, present(group.inner, names)) for group in among if group.name in names)


def entered(among: Iterable[Group]) -> list[str]:
    """Return the names in the order in which forward enters the groups: an outer group before its inner groups."""
    return [name for group in among for name in (group.name, *entered(group.inner))]


def entered_backward(among: Sequence[Group]) -> list[str]:
    """Return the names in the order in which backward enters the groups: an outer group before its inner groups."""
    return [name for group in reversed(among) for name in (group.name, *entered_backward(group.inner))]


def left(among: Iterable[Group]) -> list[str]:
    """Return the names in the order in which forward leaves the groups: an outer group after its inner groups."""
    return [name for group in among for name in (*left(group.inner), group.name)]


def prefetched_in_forward(group: str, config: TrainerConfig) -> list[str]:
    """Return the groups that are prefetched, unless they are unsharded already, when forward has entered a group."""
    order = entered(groups(config))
    following = order.index(group) + 1
    return order[following : following + config.forward_prefetch]


def prefetched_in_backward(group: str, left: Sequence[str], count: int) -> list[str]:
    """Return the groups that are prefetched, unless they are unsharded already, when backward has entered a group.

    Backward enters groups in the reverse of the order in which forward has `left` them.
    """
    index = left.index(group)
    return list(reversed(left[max(0, index - count) : index]))


class ForwardOrder:
    """Order in which forwards have left groups; each backward through a group takes the group's last place in it."""

    def __init__(self) -> None:
        self.left: list[str] = []
        """Groups, once for each forward."""
        self._places: dict[str, list[int]] = {}

    def leave(self, group: str) -> None:
        """Note that a forward has left a group."""
        self._places.setdefault(group, []).append(len(self.left))
        self.left.append(group)

    def take(self, group: str, *, keeps: bool = False) -> list[str]:
        """Return the group that was left before the last place of a group, and take that place unless it `keeps`."""
        places = self._places.get(group, [])
        if not places:
            return []
        place = places[-1] if keeps else places.pop()
        return self.left[max(0, place - 1) : place]

    def clear(self) -> None:
        """Forget all forwards."""
        self.left.clear()
        self._places.clear()


def chunk_size(size: int, ranks: int, rank: int) -> int:
    """Return a rank's share of a sharded dimension: equal chunks, rounded up; the last ranks have less, or none.

    >>> [chunk_size(5, 4, rank) for rank in range(4)]
    [2, 2, 1, 0]
    """
    chunk = -(-size // ranks)
    return max(0, min(chunk, size - chunk * rank))


def has_shards_of_columns(shape: Sequence[int], config: TrainerConfig, shards: int) -> bool:
    """Return whether FSDP shards dimension 1 of a parameter, of which a tensor-parallel rank has this shape."""
    return config.shard_placement == "columns" and shards > 1 and len(shape) == 2 and shape[1] % shards == 0


class Sharding(NamedTuple):
    """Parameter as FSDP shards it: a rank's part of it under tensor or expert parallelism, cut along its rows.

    Rows are cut into equal chunks, rounded up: a shard is padded. Stacked experts are divided among `mesh.ep`
    consecutive ranks first, and each part is then sharded over the ranks that hold the same experts.
    """

    group: str
    rows: int
    """Length of the sharded dimension."""
    row_numel: int
    """Elements of each row."""
    ranks: int
    """Number of ranks that have a shard of this part."""
    ep: int = 1
    """Consecutive ranks of `dp_shard` that hold different experts."""
    by_columns: bool = False
    """True if dimension 1 is sharded, so that FSDP copies gathered tensors and gradients once more."""
    in_float8: bool = False
    """True if shards are cast to float8, with one scale for all of them, before they are gathered."""

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return self.rows * self.row_numel

    @property
    def shard(self) -> int:
        """Elements of each rank's shard, with padding."""
        return -(-self.rows // self.ranks) * self.row_numel

    @property
    def padded(self) -> int:
        """Elements of all shards together."""
        return self.shard * self.ranks

    def gathered_bytes(self, compute_bytes: int) -> int:
        """Return the bytes of all shards together as they are gathered, in the dtype of computation or in float8."""
        return self.padded * (1 if self.in_float8 else compute_bytes)

    def own(self, shard_rank: int) -> int:
        """Return the elements of the shard of a coordinate in `dp_shard`, without padding."""
        return chunk_size(self.rows, self.ranks, shard_rank // self.ep) * self.row_numel


def shardings(shapes: Shapes, config: TrainerConfig, *, shards: int) -> dict[str, Sharding]:
    """Return how FSDP shards each parameter over `shards` ranks, those of `dp_shard`."""
    found, in_float8 = {}, gathered_in_float8(config)
    for name, shape in shapes.items():
        by_columns = has_shards_of_columns(shape, config, shards)
        rows, *rest = reversed(shape) if by_columns else shape
        group = group_of(name, config)
        ep = config.mesh.ep if _is_of_experts(group, config) else 1
        found[name] = Sharding(group, rows // ep, prod(rest), shards // ep, ep, by_columns, name in in_float8)
    return found


def shard_numels(shapes: Shapes, config: TrainerConfig, *, shards: int) -> dict[str, int]:
    """Return the elements of a rank's shard of each group, by name, with padding."""
    numels: dict[str, int] = {}
    for sharding in shardings(shapes, config, shards=shards).values():
        numels[sharding.group] = numels.get(sharding.group, 0) + sharding.shard
    return numels


def gather_input(group: str, numel: int, config: TrainerConfig, dims: ParallelDims) -> tuple[int, str]:
    """Return the elements and the dtype of a rank's input of the all-gather of a group, of which it has `numel`.

    Shards of several dtypes are gathered as bytes (`foreach_all_gather` in
    torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    """
    wide, narrow = dtype_policy(config.precision).compute, 0
    for name, size in gathered_in_float8(config).items():
        narrow += size // dims.dp_shard if group_of(name, config) == group else 0
    if narrow in (0, numel):
        return numel, FLOAT8 if narrow else wide
    return narrow + (numel - narrow) * int(getattr(torch, wide).itemsize), "uint8"


def subgroup(ranks: int, dims: ParallelDims) -> str:
    """Return the name of a group of so many ranks of `dp_shard`, as `instruments.facts.Collective` has it."""
    return "dp_shard" if ranks == dims.dp_shard else f"dp_shard/{ranks}"


def _is_of_experts(module: str, config: TrainerConfig) -> bool:
    """Return whether a module has experts, or is inside of theirs, that are divided among ranks."""
    return config.mesh.ep > 1 and f".{_EXPERTS}." in f"{module}."


def kept_after_forward(group: str, config: TrainerConfig) -> bool:
    """Return whether a group stays unsharded between forward and backward."""
    return ranks_after_forward(group, config) == 1


def ranks_after_forward(group: str, config: TrainerConfig) -> int:
    """Return the number of ranks over which a group is sharded between forward and backward.

    1 stands for unsharded, 0 for all ranks as before. `default` keeps norm and output unsharded, which backward needs
    at once, in a pipeline all groups, and `except-last` also the last block. In a table the first expression that
    matches the full name decides.
    """
    mode, last_block = config.reshard, f"layers.{config.model.n_layers - 1}"
    match mode:
        case dict():
            matching = (value for expression, value in mode.items() if re.fullmatch(expression, group))
            value = next(matching, "always")
            return value if isinstance(value, int) else {"always": 0, "never": 1}[value]
        case int():
            return mode
        case "auto":
            mode = _automatic(config)
    kept = {
        "always": False,
        "never": True,
        "default": group in (_NORM, _OUTPUT) or config.mesh.pp > 1,
        "except-last": group in (_NORM, _OUTPUT) or group.startswith(last_block),
    }
    return int(kept[mode])


def _automatic(config: TrainerConfig) -> Literal["never", "default", "always"]:
    """Mode that `auto` must choose in clear cases; raises ValueError for others.

    Parameters, gradients, two Adam moments and as much again fit by far, or the parameters alone do not.
    """
    parameters = sum(p.numel() for p in outline(config.model).parameters())
    tokens = config.data.global_batch_size * config.data.seq_len
    if (config.memory_bytes or 0) > 64 * parameters * (1 + tokens):
        return "never"
    if (config.memory_bytes or math.inf) < 2 * parameters:
        return "default" if config.mesh.pp == 1 else "always"
    raise ValueError(f"memory_bytes {config.memory_bytes}: what auto chooses is not clear; give it much more, or less")


def gradient_sync(config: TrainerConfig) -> GradientSync:
    """Return the micro-batches after which gradients are reduced: in a pipeline the last one of each stage."""
    return config.gradient_sync if config.mesh.pp == 1 else "last"


def communicates(config: TrainerConfig, micro_batch: int) -> tuple[bool, bool]:
    """Return whether the backward of a micro-batch reduces gradients within shard groups, and whether over replicas."""
    last = micro_batch == config.accumulation - 1
    return {"each": (True, True), "last": (last, last), "all-reduce-last": (True, last)}[gradient_sync(config)]


def backward_count(config: TrainerConfig) -> int:
    """Return the number of backward passes of a step."""
    return config.accumulation // config.passes


def passes_of(group: str, config: TrainerConfig, last: int) -> list[int]:
    """Return the micro-batches, in their order, of which the backward that ends with the `last` computes a group."""
    together = range(last + 1 - config.passes, last + 1)
    return [micro_batch for micro_batch in together if is_computed(group, config, [micro_batch])]


def unsharded_after_forward(group: str, config: TrainerConfig) -> bool:
    """Return whether a group is unsharded before the last backward of a step: it is kept, and has been computed."""
    computed = config.evaluation != "none" or passes_of(group, config, config.accumulation - 1)
    return kept_after_forward(group, config) and bool(computed)


def leaves_in_backward(group: str, config: TrainerConfig, trained_groups: Collection[str], micro_batch: int) -> bool:
    """Return whether FSDP leaves a group in the midst of a backward, when the gradient of the group's input is there.

    Without parameters that train before the group in the forward pass of the micro-batch its input has none, and only
    the end of the backward leaves it, as it leaves a group that the pass does not compute.
    """
    order = [name for name in entered(groups(config)) if is_computed(name, config, [micro_batch])]
    before = [name for name in order[: order.index(group)] if name in trained_groups] if group in order else []
    return any(_trains_before(name, group, config) for name in before)


def _trains_before(outer: str, group: str, config: TrainerConfig) -> bool:
    """Return whether a group that is entered before another has parameters that train and compute before it.

    Around the blocks that is the embedding alone; a block has none before its first norm.
    """
    if outer == _OUTPUT:
        return is_trained(f"{_EMBEDDING}.weight", config)
    return group != f"{outer}.attention_norm"


def reduces_earlier(group: str, config: TrainerConfig, trained_groups: Collection[str]) -> bool:
    """Return whether the last backward of a step reduces gradients of a group that wait before its own are complete.

    FSDP leaves a group once for each forward pass that computes it. The first time it finds the gradients of earlier
    backwards, which wait for a reduction, and reduces them, although those of this backward come when all passes are
    through (findings/passes_reduce_twice.py). From 2.15 on it then reduces also what waits for the all-reduce alone.
    """
    partial = traits_of(str(torch.__version__)).reduces_partial_sums_alone
    waits = gradient_sync(config) in (("last", "all-reduce-last") if partial else ("last",))
    together = passes_of(group, config, config.accumulation - 1)
    waits = waits and backward_count(config) > 1 and len(together) > 1
    return waits and leaves_in_backward(group, config, trained_groups, together[-1])


def reduces_twice(config: TrainerConfig) -> bool:
    """Return whether the last backward of a step reduces any group twice, see `reduces_earlier`."""
    names = entered(groups(config))
    return any(reduces_earlier(name, config, names) for name in names)


def reduced_numels(shapes: Shapes, config: TrainerConfig, *, shards: int) -> dict[str, int]:
    """Return the elements of a rank's shard of the gradients of each group, without groups that are frozen."""
    return shard_numels(trained(shapes, config), config, shards=shards)


def fsdp_events(
    config: TrainerConfig, dims: ParallelDims, numels: Mapping[str, int], reduced: Mapping[str, int] | None = None
) -> list[Event]:
    """Return all collectives over `dp_shard` and `dp_replicate` of one optimizer step: those of forward and backward.

    `numels` are the elements of shards, see `shard_numels`, `reduced` those of their gradients, see `reduced_numels`;
    None: of all parameters. A dimension of a single rank communicates nothing; for
    exceptions see `VersionTraits.one_rank_gathers`.
    """
    schedule = _Schedule(config, dims, numels, numels if reduced is None else reduced)
    schedule.run()
    return schedule.events


def fsdp_groups(
    config: TrainerConfig, dims: ParallelDims, numels: Mapping[str, int], reduced: Mapping[str, int] | None = None
) -> list[str]:
    """Return the group of each collective of `fsdp_events`, in the same order."""
    schedule = _Schedule(config, dims, numels, numels if reduced is None else reduced)
    schedule.run()
    return schedule.names


def _is_recomputed(group: str, config: TrainerConfig) -> bool:
    """Return whether backward recomputes all of a group's module; with `selective` no group has inner ones."""
    return config.activation_checkpointing == "full" and group.startswith("layers.")


def _norms_are_groups(config: TrainerConfig) -> bool:
    return config.precision == "bf16-mixed"


class _Schedule:
    """Walk through the groups as forward does, and back."""

    def __init__(
        self, config: TrainerConfig, dims: ParallelDims, numels: Mapping[str, int], reduced: Mapping[str, int]
    ) -> None:
        self.events: list[Event] = []
        self.names: list[str] = []
        """Group of each event."""
        self._config, self._dims, self._numels, self._reduced = config, dims, numels, reduced
        self._groups = present(groups(config), numels)
        self._policy, self._traits = dtype_policy(config.precision), traits_of(str(torch.__version__))
        self._unsharded: set[str] = set()
        self._smaller: dict[str, int] = {}
        """Number of ranks by group, for groups that are sharded over fewer ranks until backward."""
        self._left = ForwardOrder()
        """Also of recomputed forwards, see `VersionTraits.recomputation_reshards`."""
        self._in_backward: set[str] = set()
        """Groups that a backward has entered and not left."""
        self._waiting: set[str] = set()
        """Groups with gradients of earlier backwards that wait for a reduction."""
        self._during = ""

    def run(self) -> None:
        for micro_batch in range(self._config.accumulation):
            if micro_batch and self._config.evaluation != "none":
                self._forward(self._groups, "evaluate")
            self._forward(self._computed(micro_batch), "forward")
            self._during = ""
            if (micro_batch + 1) % self._config.passes == 0:
                self._backward_of_passes(micro_batch)

    def _computed(self, micro_batch: int) -> tuple[Group, ...]:
        names = entered(self._groups)
        return present(self._groups, [name for name in names if is_computed(name, self._config, [micro_batch])])

    def _backward_of_passes(self, last: int) -> None:
        """Walk back through all forward passes, the last one first; gradients are complete in that of the first."""
        for micro_batch in reversed(range(last + 1 - self._config.passes, last + 1)):
            self._backward(self._computed(micro_batch), micro_batch, last)
        for group in entered(self._groups):
            if group in self._in_backward or not passes_of(group, self._config, last):
                self._leave_backward(group, last, is_complete=True)
        self._unsharded.clear()  # groups prefetched after their backward are freed
        self._smaller.clear()
        self._left.clear()

    def _forward(self, among: Sequence[Group], phase: str) -> None:
        for group in among:
            self._during = group.name
            self._gather(phase, group.name)
            for name in prefetched_in_forward(group.name, self._config):
                self._gather(phase, name)
            self._forward(group.inner, phase)
            self._left.leave(group.name)
            self._reshard(group.name)

    def _reshard(self, group: str) -> None:
        """Leave a group after forward."""
        ranks = ranks_after_forward(group, self._config)
        if ranks != 1:
            self._unsharded.discard(group)
        if ranks > 1:
            self._smaller[group] = ranks

    def _backward(self, among: Sequence[Group], micro_batch: int, last: int) -> None:
        for group in reversed(among):
            if not self._has_gradient(group, micro_batch):
                continue
            self._enter_backward(group.name)
            if _is_recomputed(group.name, self._config) and self._traits.recomputation_reshards:
                self._recompute(group.inner)
            self._backward(group.inner, micro_batch, last)
            if leaves_in_backward(group.name, self._config, self._reduced, micro_batch):
                is_complete = micro_batch == passes_of(group.name, self._config, last)[0]
                self._leave_backward(group.name, last, is_complete=is_complete)

    def _has_gradient(self, group: Group, micro_batch: int) -> bool:
        """Return whether the output of a group has a gradient, with which backward enters the group."""
        trains = any(name in self._reduced for name in entered([group]))
        return trains or leaves_in_backward(group.name, self._config, self._reduced, micro_batch)

    def _leave_backward(self, group: str, last: int, *, is_complete: bool) -> None:
        """Free a group, even where its gradients stay: the next micro-batch gathers it again."""
        self._unsharded.discard(group)
        self._in_backward.discard(group)
        has_gradients = is_complete and passes_of(group, self._config, last)
        if has_gradients or group in self._waiting:
            self._reduce(group, *communicates(self._config, last))

    def _enter_backward(self, group: str) -> None:
        """Gather a group and prefetch others; those of the recorded order once, until backward leaves the group."""
        if group not in self._in_backward or self._config.backward_prefetch:
            self._gather("backward", group)
            for name in self._prefetched_in_backward(group):
                self._gather("backward", name)
        self._in_backward.add(group)

    def _reduce(self, group: str, reduce_scatter: bool, all_reduce: bool) -> None:
        if reduce_scatter:
            self._issue("backward", "reduce_scatter", group)
        if all_reduce:
            self._issue("backward", "all_reduce", group)
        waits = not reduce_scatter or (not all_reduce and self._traits.reduces_partial_sums_alone)
        (self._waiting.add if waits else self._waiting.discard)(group)

    def _recompute(self, inner: Sequence[Group]) -> None:
        for group in inner:
            self._gather("backward", group.name)
            self._left.leave(group.name)
            self._reshard(group.name)

    def _prefetched_in_backward(self, group: str) -> list[str]:
        """Return the groups that are prefetched; a group without a list follows the recorded order.

        That has the forwards of an evaluation as well: backward ends with a group that they left last.
        """
        listed = prefetched_in_backward(group, left(self._groups), self._config.backward_prefetch)
        return listed if listed or group in self._in_backward else self._left.take(group)

    def _gather(self, phase: str, group: str) -> None:
        if group not in self._unsharded:
            self._unsharded.add(group)
            self._issue(phase, "all_gather", group, smaller=self._smaller.pop(group, 0))

    def _issue(self, phase: str, kind: Kind, group: str, *, smaller: int = 0) -> None:
        over = "dp_replicate" if kind == "all_reduce" else "dp_shard"
        ranks: int = getattr(self._dims, over)
        if kind != "all_reduce" and _is_of_experts(group, self._config):
            ranks //= self._dims.ep
            over = subgroup(ranks, self._dims)
        traits = self._traits
        alone = {"all_gather": traits.one_rank_gathers, "reduce_scatter": traits.one_rank_reduces, "all_reduce": False}
        if ranks == 1 and not alone[kind]:
            return
        if kind != "all_gather" and group not in self._reduced:
            return
        # The input of a reduce-scatter is an unsharded group, that of the others a shard.
        numel = (self._numels if kind == "all_gather" else self._reduced)[group]
        numel, dtype = numel * (ranks if kind == "reduce_scatter" else 1), self._policy.reduce
        if kind == "all_gather":
            numel, dtype = gather_input(group, numel, self._config, self._dims)
        if smaller:
            over, numel = f"{over}/{smaller}", numel * ranks // smaller
        self.events.append(Event(phase, kind, over, numel, dtype, during=self._during))
        self.names.append(group)
