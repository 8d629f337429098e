"""Faults of the optimizer: which parameters it holds, and which of them decay."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from conformance.defects.injection import Defect, replaced_call
from reference_trainer.config import OptimizerConfig
from reference_trainer.model import Transformer


def block_before_optimizer(*, unshard: bool) -> AbstractContextManager[None]:
    """Unshard a block before the optimizer is built, or reshard it although it is sharded."""

    def build_optimizer(
        original: Callable[..., torch.optim.Optimizer], model: Transformer, config: OptimizerConfig
    ) -> torch.optim.Optimizer:
        block: Any = model.layers[0]  # fully_shard has added the methods of FSDPModule
        if unshard:
            block.unshard()
        else:
            block.reshard()
        return original(model, config)

    return replaced_call("reference_trainer.train", "build_optimizer", build_optimizer)


OPTIMIZER_STALE_PARAMETERS = Defect(
    id="optimizer-stale-params",
    title="the optimizer holds tensors that are not trained",
    source="https://github.com/pytorch/pytorch/issues/149205",
    mechanism="the optimizer is built while a group is unsharded, and gets its plain parameters",
    laws=("OPT-1", "PAR-1"),
    cells="id = dp1-fp32-default-meta",
    inject=partial(block_before_optimizer, unshard=True),
    inject_twin=partial(block_before_optimizer, unshard=False),
)


Groups = list[dict[str, Any]]
"""Parameter groups of an optimizer."""


def optimizer_groups(regroup: Callable[[Groups], Groups]) -> AbstractContextManager[None]:
    """Give the optimizer the parameter groups `regroup(groups)`."""

    def parameter_groups(original: Callable[..., Groups], model: nn.Module, *, weight_decay: float) -> Groups:
        return regroup(original(model, weight_decay=weight_decay))

    return replaced_call("reference_trainer.optim", "parameter_groups", parameter_groups)


def without_last_parameter(groups: Groups) -> Groups:
    """Return the groups without the last parameter."""
    *others, last = groups
    return [*others, {**last, "params": last["params"][:-1]}]


def group_per_parameter(groups: Groups) -> Groups:
    """Return a group for each parameter, with the options of the group that it was in."""
    return [{**group, "params": [p]} for group in groups for p in group["params"]]


OPTIMIZER_DROPS_PARAMETERS = Defect(
    id="opt-drop-params",
    title="a parameter is missing in the optimizer",
    source="https://github.com/huggingface/accelerate/issues/3394",
    mechanism="the last parameter is in none of the groups",
    laws=("OPT-1", "PAR-1"),
    cells="id = dp1-fp32-default-meta",
    inject=partial(optimizer_groups, without_last_parameter),
    inject_twin=partial(optimizer_groups, group_per_parameter),
)


def single_group(groups: Groups) -> Groups:
    """Return one group of all parameters, with the options of the first: every parameter decays."""
    return [{**groups[0], "params": [p for group in groups for p in group["params"]]}]


WEIGHT_DECAY_GROUPS_LOST = Defect(
    id="weight-decay-groups-lost",
    title="norms and biases decay",
    source="https://github.com/volcengine/verl/issues/5070",
    mechanism="all parameters are in one group",
    laws=("OPT-1", "PAR-1"),
    cells="id = dp1-fp32-default-meta",
    inject=partial(optimizer_groups, single_group),
    inject_twin=partial(optimizer_groups, group_per_parameter),
)
