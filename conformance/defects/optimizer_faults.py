"""Faults of the optimizer: which parameters it holds, and which of them decay."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from conformance.defects.injection import Defect, replaced
from reference_trainer.config import OptimizerConfig
from reference_trainer.model import Transformer


def optimizer_built(*, unshard: bool) -> AbstractContextManager[None]:
    """Build the optimizer after a block was gathered, or freed although it is."""

    def make(original: Any) -> Any:
        def build_optimizer(model: Transformer, config: OptimizerConfig) -> torch.optim.Optimizer:
            block: Any = model.layers[0]  # fully_shard has added the methods of FSDPModule
            if unshard:
                block.unshard()
            else:
                block.reshard()
            return original(model, config)  # type: ignore[no-any-return]

        return build_optimizer

    return replaced("reference_trainer.train", "build_optimizer", make)


Groups = list[dict[str, Any]]
"""Parameter groups of an optimizer."""


def grouped(regroup: Callable[[Groups], Groups]) -> AbstractContextManager[None]:
    """Give the optimizer other parameter groups."""

    def make(original: Any) -> Any:
        def parameter_groups(model: nn.Module, *, weight_decay: float) -> Groups:
            return regroup(original(model, weight_decay=weight_decay))

        return parameter_groups

    return replaced("reference_trainer.optim", "parameter_groups", make)


def without_last(groups: Groups) -> Groups:
    """All parameters but one."""
    *others, last = groups
    return [*others, {**last, "params": last["params"][:-1]}]


def all_in_first(groups: Groups) -> Groups:
    """One group, with the options of the first: all decays."""
    return [{**groups[0], "params": [p for group in groups for p in group["params"]]}]


def one_each(groups: Groups) -> Groups:
    """A group for each parameter, with the options of the group that it was in."""
    return [{**group, "params": [p]} for group in groups for p in group["params"]]


DEFECTS: tuple[Defect, ...] = (
    Defect(
        id="optimizer-stale-params",
        title="the optimizer holds tensors that are not trained",
        source="https://github.com/pytorch/pytorch/issues/149205",
        mechanism="the optimizer is built while a group is unsharded, and gets its plain parameters",
        laws=("OPT-1", "PAR-1"),
        inject=partial(optimizer_built, unshard=True),
        inject_twin=partial(optimizer_built, unshard=False),
    ),
    Defect(
        id="opt-drop-params",
        title="a parameter is missing in the optimizer",
        source="https://github.com/huggingface/accelerate/issues/3394",
        mechanism="the last parameter is in none of the groups",
        laws=("OPT-1", "PAR-1"),
        inject=partial(grouped, without_last),
        inject_twin=partial(grouped, one_each),
    ),
    Defect(
        id="weight-decay-groups-lost",
        title="norms and biases decay",
        source="https://github.com/volcengine/verl/issues/5070",
        mechanism="all parameters are in one group",
        laws=("OPT-1", "PAR-1"),
        inject=partial(grouped, all_in_first),
        inject_twin=partial(grouped, one_each),
    ),
)
