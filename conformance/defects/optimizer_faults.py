"""Faults of the optimizer: which parameters it holds, which of them decay, and by which norm gradients are clipped."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn.utils import clip_grads_with_norm_

from conformance.defects.injection import Defect, replaced
from conformance.instruments.sharding import local
from reference_trainer.config import OptimizerConfig
from reference_trainer.model import Transformer


def clipping(norm_of: Callable[[list[Tensor]], Tensor]) -> AbstractContextManager[None]:
    """Clip with a norm that is computed by hand."""

    def make(_original: Any) -> Any:
        def clip_gradients(parameters: Iterable[nn.Parameter], *, max_norm: float) -> Tensor:
            parameters = list(parameters)
            norm = norm_of([p.grad for p in parameters if p.grad is not None])
            if max_norm > 0:
                clip_grads_with_norm_(parameters, max_norm, norm, foreach=False)  # may be of several kinds
            return norm

        return clip_gradients

    return replaced("reference_trainer.train", "clip_gradients", make)


def local_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of this rank's shards alone."""
    return torch.stack([local(grad).square().sum() for grad in gradients]).sum().sqrt()


def reduced_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of the full gradients: squares of the shards, summed over the ranks that hold different shards."""
    squares = torch.zeros(())
    for grad in gradients:
        square = local(grad).square().sum()
        if isinstance(grad, DTensor):
            placements = [p if p.is_replicate() else Partial() for p in grad.placements]
            square = DTensor.from_local(square, grad.device_mesh, placements).full_tensor()
        squares += square
    return squares.sqrt()


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
        id="clip-norm-local",
        title="the gradient norm is that of the local shards",
        source="https://github.com/pytorch/pytorch/issues/170862",
        mechanism="clipping by hand takes the norm over this rank's shards and forgets to reduce it",
        laws=("PAR-1", "PAR-5"),
        inject=partial(clipping, local_norm),
        inject_twin=partial(clipping, reduced_norm),
    ),
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
