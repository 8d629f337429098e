"""Faults that are put into a subject's step, to see whether the laws see with this subject's eyes.

An adapter that shows the suite something else than what it trains would pass every law. Faults reach parameters and
optimizer by public hooks of torch, so that what the adapter tells has no part in them: a law that holds on the subject
must fail with each of them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from conformance.instruments.sharding import local
from conformance.subjects.protocol import Built


def sum_gradients(run: Built, _max_norm: float) -> None:
    """Make gradients the sum over all ranks, not the mean."""

    def multiply(parameter: Tensor) -> None:
        if parameter.grad is not None:
            local(parameter.grad).mul_(dist.get_world_size())

    for parameter in _trained(run):
        parameter.register_post_accumulate_grad_hook(multiply)  # type: ignore[no-untyped-call]


def clip_by_local_norm(run: Built, max_norm: float) -> None:
    """Let each rank clip by the norm of its own shards, to a limit below all norms."""

    def clip(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        gradients = [local(p.grad) for p in _held(optimizer) if p.grad is not None]
        own = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(0.1 * max_norm / (own + 1e-6))

    run.optimizer.register_step_pre_hook(clip)


def skip_parameter(run: Built, _max_norm: float) -> None:
    """Take the gradient of one parameter away before the optimizer steps."""
    skipped = _trained(run)[0]

    def forget(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        skipped.grad = None

    run.optimizer.register_step_pre_hook(forget)


def keep_stale_shard(run: Built, _max_norm: float) -> None:
    """Undo the first update of one shard of the last rank."""
    shards = [local(parameter) for parameter in _trained(run)]
    shard = next((shard for shard in shards if shard.numel()), None)
    if shard is not None and dist.get_rank() == dist.get_world_size() - 1:
        _undo(run.optimizer, [shard], steps=1)


def freeze_parameters(run: Built, _max_norm: float) -> None:
    """Undo every update of every parameter."""
    _undo(run.optimizer, [local(parameter) for parameter in _trained(run)], steps=None)


FAULTS: Mapping[str, Callable[[Built, float], None]] = {
    "gradients-summed": sum_gradients,
    "local-norm": clip_by_local_norm,
    "parameter-skipped": skip_parameter,
    "stale-shard": keep_stale_shard,
    "parameters-frozen": freeze_parameters,
}
"""Functions that put a fault into a run, given the limit of clipping, by name."""


def _undo(optimizer: Optimizer, shards: list[Tensor], *, steps: int | None) -> None:
    """Let the optimizer's first steps, or all of them, leave shards as they were."""
    kept: list[Tensor] = []
    taken = 0

    def keep(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        kept[:] = [shard.clone() for shard in shards]

    def restore(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        nonlocal taken
        taken += 1
        if steps is None or taken <= steps:
            for shard, before in zip(shards, kept, strict=True):
                shard.copy_(before)

    optimizer.register_step_pre_hook(keep)
    optimizer.register_step_post_hook(restore)


def _trained(run: Built) -> list[nn.Parameter]:
    return [parameter for parameter in run.model.parameters() if parameter.requires_grad]


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
