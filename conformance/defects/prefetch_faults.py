"""Faults of prefetching: too many groups, none, or other groups than those that come next."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conformance.defects.injection import Defect, repeated_call, replaced_call
from reference_trainer.config import TrainerConfig
from reference_trainer.model import Block
from reference_trainer.prefetch import forward_order

_PREFETCH = "reference_trainer.prefetch"
_PREFETCHED = (
    "id = dp2-fp32-default-meta-fpre1 or model = deep and forward_prefetch = 1 and reshard in (default, always)"
)

PREFETCH_DROPPED = Defect(
    id="prefetch-dropped",
    title="no group is prefetched, whatever the configuration says",
    source="https://github.com/verl-project/verl/pull/6317",
    mechanism="the function that builds with FSDP2 does not pass the option on",
    laws=("AXIS-1", "MEM-1", "MEM-3", "RS-1"),
    cells=_PREFETCHED,
    inject=partial(repeated_call, "reference_trainer.parallelize", "apply_prefetch", times=0),
    inject_twin=partial(repeated_call, "reference_trainer.parallelize", "apply_prefetch", times=2),  # the last counts
)


def prefetched_groups(*, too_many: int) -> AbstractContextManager[None]:
    """Prefetch this many groups more than the configuration asks for, if it asks for any."""

    def each_with_next(original: Callable[..., Any], names: Sequence[str], number: int) -> Any:
        return original(names, number + too_many if number else 0)

    return replaced_call(_PREFETCH, "each_with_next", each_with_next)


PREFETCH_ONE_TOO_MANY = Defect(
    id="prefetch-one-too-many",
    title="one group more is prefetched than the configuration asks for",
    source="https://github.com/pytorch/pytorch/pull/86198",
    mechanism="the limit does not count the groups that are gathered already, so that prefetching exceeds it",
    laws=("AXIS-1", "MEM-1", "RS-1"),
    cells=_PREFETCHED,
    inject=partial(prefetched_groups, too_many=1),
    inject_twin=partial(prefetched_groups, too_many=0),
)


def neighbours(*, before: bool) -> AbstractContextManager[None]:
    """Prefetch the groups before each group, nearest first, or those after it."""

    def each_with_next(original: Callable[..., Iterator[Any]], names: Sequence[str], number: int) -> Iterator[Any]:
        return original(names[::-1] if before else names, number)

    return replaced_call(_PREFETCH, "each_with_next", each_with_next)


PREFETCH_OF_USED_GROUP = Defect(
    id="prefetch-of-used-group",
    title="groups are prefetched that have been used already",
    source="https://github.com/NVIDIA/Megatron-LM/pull/6153",
    mechanism="a group prefetches groups that have computed before, and nothing frees them before the pass ends",
    laws=("MEM-1", "MEM-3", "RS-1"),
    cells=_PREFETCHED,
    inject=partial(neighbours, before=True),
    inject_twin=partial(neighbours, before=False),
)


def backward_order(*, reversed_forward: bool) -> AbstractContextManager[None]:
    """Take forward reversed for the order of backward, a block after the groups inside of it; or the true order."""

    def order(original: Callable[[TrainerConfig], list[str]], config: TrainerConfig) -> list[str]:
        return forward_order(config)[::-1] if reversed_forward else original(config)

    return replaced_call(_PREFETCH, "backward_order", order)


PREFETCH_ORDER_OF_NESTED_GROUPS = Defect(
    id="prefetch-order-of-nested-groups",
    title="backward prefetches norms before the block around them",
    source="https://github.com/ByteDance-Seed/VeOmni/pull/1043",
    mechanism="the order of backward is taken to be that of forward reversed, but it enters outer groups first",
    laws=("RS-1",),
    cells="precision = bf16-mixed and backward_prefetch > 0 and reshard != never and dp_shard > 1 and world <= 4",
    inject=partial(backward_order, reversed_forward=True),
    inject_twin=partial(backward_order, reversed_forward=False),
)


def recomputation(*, prefetches: bool) -> AbstractContextManager[None]:
    """Prefetch the groups that forward prefetches when a block is recomputed, or when it is computed first."""

    def apply_ac(original: Callable[..., None], block: Block, **options: Any) -> None:
        original(block, **options)
        recompute = block.recompute

        def layer(*inputs: Tensor) -> Tensor:
            if prefetches == (torch._C._current_graph_task_id() != -1):
                _forward_prefetch(block)
            return block.layer(*inputs)

        block.recompute = lambda _layer, *inputs: recompute(layer, *inputs)  # type: ignore[misc]

    return replaced_call("reference_trainer.parallelize", "apply_ac", apply_ac)


def _forward_prefetch(block: Any) -> None:
    for state in block._get_fsdp_state()._states_to_forward_prefetch:
        for group in state._fsdp_param_groups:
            group._prefetch_unshard(group, "forward")


PREFETCH_IN_RECOMPUTATION = Defect(
    id="prefetch-in-recomputation",
    title="activation checkpointing gathers groups whose backward is over",
    source="https://github.com/NVIDIA-NeMo/Automodel/issues/3373",
    mechanism="recomputation in backward runs the hooks of forward, which prefetch the groups after the block",
    laws=("MEM-1", "RS-1"),
    cells="activation_checkpointing = full and forward_prefetch > 0 and reshard not in (never, auto) and world <= 4",
    inject=partial(recomputation, prefetches=True),
    inject_twin=partial(recomputation, prefetches=False),
)
