"""Schedule model: which collectives FSDP2 issues in one optimizer step, in which order, of which size.

Sources: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_state.py (unshard in pre-forward and
pre-backward, then of the groups that are prefetched, by default none in forward and one in backward; reduce-scatter in
post-backward); the public contract is in the docstrings of `fully_shard` and `FSDPModule`.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import msgspec
import torch

from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.torch_versions import traits_of
from reference_trainer.config import TrainerConfig
from reference_trainer.model import Transformer
from reference_trainer.parallel_dims import ParallelDims

_EMBEDDING, _NORM, _OUTPUT = "tok_embeddings", "norm", "output"


Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]


class Event(msgspec.Struct, frozen=True):
    """One collective of one rank; `numel` is its input's."""

    phase: str
    kind: Kind
    group: str
    numel: int
    dtype: str
    reduce_op: str | None = None
    """`SUM`, `MAX`, ... where the model knows it."""
    during: str = ""
    """Of FSDP's in forward: the group that was entered last."""

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's input."""
        return self.numel * int(getattr(torch, self.dtype).itemsize)


@dataclass(frozen=True)
class Group:
    """An FSDP group; the `inner` ones run while it does, in this order."""

    name: str
    """Module that it is named after."""
    inner: "tuple[Group, ...]" = ()


def groups(config: TrainerConfig) -> tuple[Group, ...]:
    """The groups in forward order: the embedding, each block, norm and output together.

    Masters of two dtypes (`bf16-mixed`) put each norm into a group of its own. A tied weight makes embedding and output
    one group, which runs from the first to the last module.
    """
    norms = ("attention_norm", "ffn_norm") if _norms_apart(config) else ()
    blocks = [f"layers.{i}" for i in range(config.model.n_layers)]
    middle = tuple(Group(block, tuple(Group(f"{block}.{norm}") for norm in norms)) for block in blocks)
    if norms:
        middle += (Group(_NORM),)
    if config.model.tied_embeddings:
        return (Group(_OUTPUT, middle),)
    return (Group(_EMBEDDING), *middle, Group(_OUTPUT))


def group_of(parameter: str, config: TrainerConfig) -> str:
    """Name of the group that a parameter belongs to."""
    module = parameter.rpartition(".")[0]
    if module.startswith("layers."):
        apart = _norms_apart(config) and module.endswith("_norm")
        return module if apart else ".".join(module.split(".")[:2])
    if (module == _EMBEDDING and not config.model.tied_embeddings) or (module == _NORM and _norms_apart(config)):
        return module
    return _OUTPUT


def entered(among: Iterable[Group]) -> list[str]:
    """Names in the order in which forward enters the groups: an outer one before those inside of it."""
    return [name for group in among for name in (group.name, *entered(group.inner))]


def gathered_ahead_in_forward(group: str, config: TrainerConfig) -> list[str]:
    """The groups that are gathered, unless they are already, when forward has entered this one."""
    order = entered(groups(config))
    following = order.index(group) + 1
    return order[following : following + config.forward_prefetch]


def gathered_ahead_in_backward(group: str, left: Sequence[str], config: TrainerConfig) -> list[str]:
    """The same for backward, which enters groups in the reverse of the order in which forward has `left` them."""
    index = left.index(group)
    return list(reversed(left[max(0, index - (config.backward_prefetch or 1)) : index]))


def shard_numels(shapes: Mapping[str, Sequence[int]], config: TrainerConfig, *, shards: int) -> dict[str, int]:
    """Elements of a rank's shard of each group, by name.

    `shapes` are what FSDP divides, by parameter. Dimension 0 is split into equal parts, rounded up: a shard is padded.
    """
    numels: dict[str, int] = {}
    for parameter, (rows, *rest) in shapes.items():
        group = group_of(parameter, config)
        numels[group] = numels.get(group, 0) + -(-rows // shards) * prod(rest)
    return numels


def kept_after_forward(group: str, config: TrainerConfig) -> bool:
    """Whether a group stays unsharded."""
    return ranks_after_forward(group, config) == 1


def ranks_after_forward(group: str, config: TrainerConfig) -> int:
    """Over how many ranks a group is sharded between forward and backward: 1 is not at all, 0 as ever.

    `default` keeps norm and output, which backward needs at once, and `except-last` also the last block. Of a table the
    first expression that matches the whole name decides.
    """
    mode, last_block = config.reshard, f"layers.{config.model.n_layers - 1}"
    match mode:
        case dict():
            found = next((value for expression, value in mode.items() if re.fullmatch(expression, group)), "always")
            return found if isinstance(found, int) else {"always": 0, "never": 1}[found]
        case int():
            return mode
        case "auto":
            mode = _chosen(config)
    kept = {
        "always": False,
        "never": True,
        "default": group in (_NORM, _OUTPUT),
        "except-last": group in (_NORM, _OUTPUT) or group.startswith(last_block),
    }
    return int(kept[mode])


def _chosen(config: TrainerConfig) -> Literal["never", "default"]:
    """What `auto` must choose where there is no doubt. Raises ValueError where there is.

    Parameters, gradients, two moments and as much again fit by far, or the parameters alone do not.
    """
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Transformer(config.model).parameters())
    tokens = config.data.global_batch_size * config.data.seq_len
    if (config.memory_bytes or 0) > 64 * parameters * (1 + tokens):
        return "never"
    if (config.memory_bytes or math.inf) < 2 * parameters:
        return "default"
    raise ValueError(f"memory_bytes {config.memory_bytes}: what auto chooses is not clear; give it much more, or less")


def communicates(config: TrainerConfig, micro_batch: int) -> tuple[bool, bool]:
    """Whether the backward of a micro-batch reduces gradients within a shard group, and whether over the replicas."""
    last = micro_batch == config.accumulation - 1
    return {"each": (True, True), "last": (last, last), "all-reduce-last": (True, last)}[config.gradient_sync]


def fsdp_events(config: TrainerConfig, dims: ParallelDims, numels: Mapping[str, int]) -> list[Event]:
    """All collectives over `dp_shard` and `dp_replicate` of one optimizer step, which are in forward and backward.

    `numels` are those of `shard_numels`. A dimension of one rank communicates nothing, but see
    `VersionTraits.one_rank_communicates`.
    """
    schedule = _Schedule(config, dims, numels)
    for micro_batch in range(config.accumulation):
        schedule.run(micro_batch)
    return schedule.events


def _norms_apart(config: TrainerConfig) -> bool:
    return config.precision == "bf16-mixed"


class _Schedule:
    """Walks through the groups as forward does, and back."""

    def __init__(self, config: TrainerConfig, dims: ParallelDims, numels: Mapping[str, int]) -> None:
        self.events: list[Event] = []
        self._config, self._dims, self._numels = config, dims, numels
        self._policy = dtype_policy(config.precision)
        self._unsharded: set[str] = set()
        self._smaller: dict[str, int] = {}
        """Groups that are sharded over fewer ranks until backward, and over how many."""
        self._left: list[str] = []
        """Groups in the order in which forward left them."""
        self._during = ""

    def run(self, micro_batch: int) -> None:
        self._left.clear()
        self._forward(groups(self._config))
        self._during = ""
        self._backward(groups(self._config), *communicates(self._config, micro_batch))

    def _forward(self, among: Sequence[Group]) -> None:
        for group in among:
            self._during = group.name
            self._gather("forward", group.name)
            for name in gathered_ahead_in_forward(group.name, self._config):
                self._gather("forward", name)
            self._forward(group.inner)
            self._left.append(group.name)
            ranks = ranks_after_forward(group.name, self._config)
            if ranks != 1:
                self._unsharded.discard(group.name)
            if ranks > 1:
                self._smaller[group.name] = ranks

    def _backward(self, among: Sequence[Group], reduce_scatter: bool, all_reduce: bool) -> None:
        for group in reversed(among):
            self._gather("backward", group.name)
            for name in gathered_ahead_in_backward(group.name, self._left, self._config):
                self._gather("backward", name)
            self._backward(group.inner, reduce_scatter, all_reduce)
            # Leaving backward frees a group even where its gradients stay: the next micro-batch gathers it again.
            self._unsharded.discard(group.name)
            if reduce_scatter:
                self._issue("backward", "reduce_scatter", group.name)
            if all_reduce:
                self._issue("backward", "all_reduce", group.name)

    def _gather(self, phase: str, group: str) -> None:
        if group not in self._unsharded:
            self._unsharded.add(group)
            self._issue(phase, "all_gather", group, smaller=self._smaller.pop(group, 0))

    def _issue(self, phase: str, kind: Kind, group: str, *, smaller: int = 0) -> None:
        over = "dp_replicate" if kind == "all_reduce" else "dp_shard"
        ranks: int = getattr(self._dims, over)
        if ranks == 1 and not (over == "dp_shard" and traits_of(str(torch.__version__)).one_rank_communicates):
            return
        # The input of a reduce-scatter is a whole group, that of the others a shard.
        numel = self._numels[group] * (ranks if kind == "reduce_scatter" else 1)
        dtype = self._policy.compute if kind == "all_gather" else self._policy.reduce
        if smaller:
            over, numel = f"{over}/{smaller}", numel * ranks // smaller
        self.events.append(Event(phase, kind, over, numel, dtype, during=self._during))
