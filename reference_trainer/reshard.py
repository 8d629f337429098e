"""Groups of parameters: those that FSDP frees after forward, and those that it all-gathers ahead of time.

The model is sharded in groups: the embedding, each block, and norm and output together. The root owns no parameters, so
that torch's treatment of a root (never resharded before 2.8) does not matter here.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import torch
from torch.distributed.fsdp import FSDPModule

from reference_trainer.checks import require
from reference_trainer.config import TrainerConfig, has_group_around_blocks
from reference_trainer.mixed_precision import torch_dtype
from reference_trainer.model import Transformer
from reference_trainer.parallel_dims import ParallelDims
from reference_trainer.precision import PRECISIONS

AfterForward = bool | int
"""Value of `reshard_after_forward`: True frees a group, False keeps it, a number is that of ranks to reshard to."""
_GIB = 1024**3
_USABLE = 0.9
"""Share of a device's memory that `auto` counts on; the rest is for fragmentation, workspaces and buffers."""


def group_names(config: TrainerConfig) -> list[str]:
    """Return the names of the groups, each that of a module, in the order in which forward enters them.

    Each norm is a separate group if the precision takes norms apart, and so are the experts of a block if they are
    divided among ranks. An embedding without a group is in that of the
    output, the last one here.
    """
    apart = PRECISIONS[config.precision].norms_apart
    blocks = [f"layers.{index}" for index in range(config.model.n_layers)]
    norms = ("attention_norm", "ffn_norm") if apart else ()
    inside = [*norms, *(["feed_forward.experts"] if config.mesh.ep > 1 else [])]
    names = [name for block in blocks for name in (block, *(f"{block}.{group}" for group in inside))]
    first = [] if has_group_around_blocks(config) else ["tok_embeddings"]
    return [*first, *names, *(["norm"] if apart else []), "output"]


@dataclass(frozen=True)
class ReshardPolicy:
    """Treatment of each group after forward."""

    after_forward: dict[str, AfterForward]
    """Value of `reshard_after_forward` by name of the group, in forward order."""
    reason: str = ""
    """Reason for a policy that `auto` has chosen; else empty."""

    def of(self, group: str) -> AfterForward:
        """Return `reshard_after_forward` of a group. Raises UsageError for a name that no group has."""
        groups = ", ".join(self.after_forward)
        require(group in self.after_forward, f"no FSDP group is named {group!r}: the groups are {groups}")
        return self.after_forward[group]

    def describe(self) -> str:
        """Return the policy in one line, consecutive groups of the same treatment together."""
        runs = [(policy, [name for name, _ in run]) for policy, run in groupby(self.after_forward.items(), _words)]
        return ", ".join(f"{' to '.join(dict.fromkeys((names[0], names[-1])))}: {policy}" for policy, names in runs)


def _words(pair: tuple[str, AfterForward]) -> str:
    _, policy = pair
    return {True: "always", False: "never"}[policy] if isinstance(policy, bool) else f"to {policy} ranks"


def reshard_policy(config: TrainerConfig, dims: ParallelDims, device: torch.device) -> ReshardPolicy:
    """Return the policy that `config.reshard` means on this mesh.

    Raises UsageError for an expression that matches no group, and for a number of ranks that torch cannot reshard to.
    """
    mode, names = config.reshard, group_names(config)
    match mode:
        case "auto":
            return _choose(config, dims, device)
        case dict():
            policy = _from_table(mode, names)
        case str():
            policy = {name: _named(mode, name, config, dims) for name in names}
        case int():
            policy = dict.fromkeys(names, mode)
    for ranks in {after for after in policy.values() if not isinstance(after, bool)}:
        _check_ranks(ranks, dims)
    return ReshardPolicy(policy)


def _named(mode: str, name: str, config: TrainerConfig, dims: ParallelDims) -> bool:
    """Return whether a group is resharded: backward begins with the last group and the last block.

    Freed, these would be all-gathered again at once. In a pipeline forwards of other micro-batches lie between a
    forward and its backward, and each would all-gather the groups that the previous one has freed: by default nothing
    is freed before the last backward.
    """
    last_group = name in ("norm", "output")
    last_block = name.startswith(f"layers.{config.model.n_layers - 1}")
    by_default = last_group or dims.pp > 1
    kept = {"always": False, "never": True, "default": by_default, "except-last": last_group or last_block}
    return not kept[mode]


def _from_table(table: Mapping[str, str | int], names: list[str]) -> dict[str, AfterForward]:
    """Apply the first expression that matches the full name; a group without a match is resharded."""
    policy: dict[str, AfterForward] = {}
    unused = dict(table)
    for name in names:
        expression = next((expression for expression in table if re.fullmatch(expression, name)), None)
        value = table[expression] if expression is not None else "always"
        policy[name] = {"always": True, "never": False}[value] if isinstance(value, str) else value
        unused.pop(expression or "", None)
    require(
        not unused,
        f"reshard: {', '.join(unused)} matches none of the groups that earlier expressions leave: {', '.join(names)}",
    )
    return policy


def _check_ranks(ranks: int, dims: ParallelDims) -> None:
    """Raise UsageError for a number that torch refuses: a divisor of the shard world, with tp = 1, is allowed."""
    require(
        ranks < dims.dp_shard and dims.dp_shard % ranks == 0,
        f"reshard to {ranks} ranks: must be a divisor of mesh.dp_shard, {dims.dp_shard}, and smaller; "
        "use always instead of all ranks",
    )
    require(
        dims.ep == 1,
        f"reshard to {ranks} ranks with mesh.ep {dims.ep}: experts have other shards than the rest; use always, never, "
        "default or except-last",
    )
    require(
        dims.tp == 1,
        f"reshard to {ranks} ranks with mesh.tp {dims.tp}: torch cannot (FSDPParam.to_sharded_post_forward raises "
        "NotImplementedError for DTensor parameters); use always, never or default",
    )


def _choose(config: TrainerConfig, dims: ParallelDims, device: torch.device) -> ReshardPolicy:
    """Keep everything if it fits, which saves the all-gathers of backward; else the default, in a pipeline nothing."""
    needed, present = estimated_peak_bytes(config, dims), config.memory_bytes or device_memory_bytes(device)
    fits = needed <= _USABLE * present
    mode = "never" if fits else ("default" if dims.pp == 1 else "always")
    reason = (
        f"reshard auto: {mode}, since keeping all parameters needs about {needed / _GIB:.3g} GiB for each rank, and "
        f"{_USABLE:.0%} of {present / _GIB:.3g} GiB may be used"
    )
    return ReshardPolicy({name: _named(mode, name, config, dims) for name in group_names(config)}, reason)


def device_memory_bytes(device: torch.device) -> int:
    """Return the memory that one rank may count on: all of its CUDA device's, or its share of the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks


def estimated_peak_bytes(config: TrainerConfig, dims: ParallelDims) -> int:
    """Estimate the peak of a rank that keeps all parameters unsharded, in the middle of backward; for `auto` alone."""
    with torch.device("meta"):
        model = Transformer(config.model)
    parameters = sum(p.numel() for p in model.parameters()) // dims.tp // dims.pp
    largest_group = max(sum(p.numel() for p in block.parameters()) for block in model.blocks.values()) // dims.tp
    compute_bytes = torch_dtype(PRECISIONS[config.precision].compute).itemsize
    state = parameters // dims.dp_shard * 4 * (2 + config.optimizer.moments)  # with gradients
    on_device = state if config.offload == "none" else 0
    communication = largest_group * (compute_bytes + 4)  # gradients of a group, and the input of their reduction
    return on_device + parameters * compute_bytes + communication + _activation_bytes(config, dims, compute_bytes)


def _activation_bytes(config: TrainerConfig, dims: ParallelDims, compute_bytes: int) -> int:
    """Activations for backward: inputs of norms and products, and logits in fp32 with their gradient."""
    model = config.model
    samples = config.data.global_batch_size // (dims.dp * config.accumulation) * config.passes
    tokens = samples * config.data.seq_len
    key_value = model.n_kv_heads * model.head_dim
    all_of_layer = 8 * model.dim + 4 * key_value + 4 * model.ffn_dim
    kept = {"none": all_of_layer, "selective": all_of_layer // 2, "full": model.dim}[config.activation_checkpointing]
    logits_bytes = model.vocab_size * (compute_bytes + 8)
    return tokens * (model.n_layers * kept * compute_bytes + logits_bytes) // dims.tp


# A group names the groups to prefetch that follow it, in the order in which forward or backward enters them. As soon as
# FSDP has the group's own parameters, and before the group computes, it all-gathers those of the named groups that are
# not gathered yet. An empty list keeps FSDP's default.


def apply_prefetch(model: Transformer, config: TrainerConfig) -> None:
    """Set the groups that each group prefetches; all groups must exist. Any module of a group may be used."""

    def module(name: str) -> FSDPModule:
        return cast("FSDPModule", model.get_submodule(name))  # `fully_shard` has added the methods of FSDPModule

    for name, next_names in each_with_next(forward_order(config), config.forward_prefetch):
        module(name).set_modules_to_forward_prefetch([module(other) for other in next_names])
    for name, next_names in each_with_next(backward_order(config), config.backward_prefetch):
        module(name).set_modules_to_backward_prefetch([module(other) for other in next_names])


def each_with_next(names: Sequence[str], number: int) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each name with the `number` names after it, or fewer at the end."""
    for index, name in enumerate(names, start=1):
        yield name, names[index : index + number]


def forward_order(config: TrainerConfig) -> list[str]:
    """Return the groups as forward enters them: first that of the output if the embedding is in it."""
    names = group_names(config)
    return names[-1:] + names[:-1] if has_group_around_blocks(config) else names


def backward_order(config: TrainerConfig) -> list[str]:
    """Return the groups as backward enters them: the reverse of how forward leaves them, blocks before their norms.

    Forward leaves a block after the norms inside of it.
    """
    order: list[str] = []
    for _, (*inside, block) in groupby(reversed(group_names(config)), key=lambda name: name.split(".")[:2]):
        order += [block, *inside]
    return order
