"""Faults of prefetching: what is gathered ahead is too much, nothing, or not what comes next."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conformance.defects.injection import Defect, replaced
from reference_trainer.config import TrainerConfig
from reference_trainer.model import Block, Transformer

_PREFETCH = "reference_trainer.prefetch"


def prefetch_applied(*, times: int) -> AbstractContextManager[None]:
    """Tell FSDP never what to gather ahead, or repeatedly: the last lists count."""

    def make(original: Any) -> Any:
        def apply_prefetch(model: Transformer, config: TrainerConfig) -> None:
            for _ in range(times):
                original(model, config)

        return apply_prefetch

    return replaced("reference_trainer.parallelize", "apply_prefetch", make)


def groups_ahead(*, too_many: int) -> AbstractContextManager[None]:
    """Gather more groups ahead than asked for, if any."""

    def make(original: Any) -> Any:
        def each_with_next(names: Sequence[str], number: int) -> Any:
            return original(names, number + too_many if number else 0)

        return each_with_next

    return replaced(_PREFETCH, "each_with_next", make)


def neighbours(*, before: bool) -> AbstractContextManager[None]:
    """Gather the groups before each group, nearest first, or those after it."""

    def make(original: Any) -> Any:
        def each_with_next(names: Sequence[str], number: int) -> Iterator[Any]:
            return original(names[::-1] if before else names, number)  # type: ignore[no-any-return]

        return each_with_next

    return replaced(_PREFETCH, "each_with_next", make)


def backward_order(*, reversed_forward: bool) -> AbstractContextManager[None]:
    """Take as the order of backward that of forward reversed, a block after what is inside of it; or the true one."""

    def make(original: Any) -> Any:
        from reference_trainer.prefetch import forward_order

        def order(config: TrainerConfig) -> list[str]:
            return forward_order(config)[::-1] if reversed_forward else original(config)

        return order

    return replaced(_PREFETCH, "backward_order", make)


def recomputation(*, prefetches: bool) -> AbstractContextManager[None]:
    """When a block is computed again, or for the first time, gather the groups that forward gathers then."""

    def make(original: Any) -> Any:
        def apply_ac(block: Block, **options: Any) -> None:
            original(block, **options)
            recompute = block.recompute

            def layer(*inputs: Tensor) -> Tensor:
                if prefetches == (torch._C._current_graph_task_id() != -1):
                    _forward_prefetch(block)
                return block.layer(*inputs)

            block.recompute = lambda _layer, *inputs: recompute(layer, *inputs)  # type: ignore[misc]

        return apply_ac

    return replaced("reference_trainer.parallelize", "apply_ac", make)


def _forward_prefetch(block: Any) -> None:
    for state in block._get_fsdp_state()._states_to_forward_prefetch:
        for group in state._fsdp_param_groups:
            group._prefetch_unshard(group, "forward")


DEFECTS: tuple[Defect, ...] = (
    Defect(
        id="prefetch-dropped",
        title="nothing is gathered ahead, whatever the configuration asks for",
        source="https://github.com/verl-project/verl/pull/6317",
        mechanism="the way to build with FSDP2 does not pass the option on",
        laws=("AXIS-1", "MEM-1", "MEM-3", "RS-1"),
        inject=partial(prefetch_applied, times=0),
        inject_twin=partial(prefetch_applied, times=2),
    ),
    Defect(
        id="prefetch-one-too-many",
        title="one group more is gathered ahead than asked for",
        source="https://github.com/pytorch/pytorch/pull/86198",
        mechanism="the limit does not count what is gathered already, so that gathering runs ahead of it",
        laws=("AXIS-1", "MEM-1", "RS-1"),
        inject=partial(groups_ahead, too_many=1),
        inject_twin=partial(groups_ahead, too_many=0),
    ),
    Defect(
        id="prefetch-of-used-group",
        title="what is gathered ahead has been used already",
        source="https://github.com/NVIDIA/Megatron-LM/pull/6153",
        mechanism="a group gathers those whose turn is over, and nothing frees them before the pass ends",
        laws=("MEM-1", "MEM-3", "RS-1"),
        inject=partial(neighbours, before=True),
        inject_twin=partial(neighbours, before=False),
    ),
    Defect(
        id="prefetch-order-of-nested-groups",
        title="backward gathers norms ahead of the block around them",
        source="https://github.com/ByteDance-Seed/VeOmni/pull/1043",
        mechanism="the order of backward is taken to be that of forward reversed, but it enters outer groups first",
        laws=("RS-1",),
        inject=partial(backward_order, reversed_forward=True),
        inject_twin=partial(backward_order, reversed_forward=False),
    ),
    Defect(
        id="prefetch-in-recomputation",
        title="activation checkpointing gathers groups whose backward is over",
        source="https://github.com/NVIDIA-NeMo/Automodel/issues/3373",
        mechanism="what is computed again in backward runs the hooks of forward, which gather the groups after it",
        laws=("MEM-1", "RS-1"),
        inject=partial(recomputation, prefetches=True),
        inject_twin=partial(recomputation, prefetches=False),
    ),
)
