"""What ranks measure of torch's own clipping: `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from conformance.defects.catalogue import injected
from conformance.experiments.clipping import Enough, trainer_with
from conformance.experiments.context import start_process_group
from conformance.experiments.training import rank_config
from conformance.instruments.sharding import full, local
from conformance.run.ranks.messages import RankContext
from reference_trainer.config import OptimizerConfig
from reference_trainer.mesh import destroy_process_group
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer, Phase

AMPLIFIED, AMPLIFICATION = "tok_embeddings.weight", 1024.0
"""The gradient with the largest element of all, before torch clips by the maximum norm: every mesh shards it, so that
no rank but one knows the norm by itself. Else it were up to the seed.
"""

Measurement = Callable[[Transformer, OptimizerConfig], dict[str, Any]]
"""Of a model that has the reduced gradients of its first step."""


def clip_with_torch(context: RankContext, payload: dict[str, Any]) -> dict[str, float]:
    """Clip the gradients of the first step with torch.nn.utils.clip_grad_norm_, as a user without this trainer would;
    by the maximum norm with one of them `AMPLIFIED`.

    Returns `full` and `item`, the norm by `full_tensor()` and by `item()`; the `factor` by which this rank's parts were
    scaled, and the `unevenness` of it: the relative deviation from one factor for all.
    """
    return _of_first_gradients(context, payload, _clipped_by_norm)


def clip_what_is_not_finite_with_torch(context: RankContext, payload: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Put a bad number into the last element of a gradient that every mesh shards, and let torch clip by the norm.

    A situation is `raise` or `go-on` (what torch is told to do) and the number: `raise/nan`. Returned for each: whether
    that `raised`, how many elements of this rank's parts it has `changed`, and whether the norm `is_finite`.
    """
    return _of_first_gradients(context, payload, _clipped_with_bad_numbers)


def clip_values_with_torch(context: RankContext, payload: dict[str, Any]) -> dict[str, int]:
    """Clip each element of the gradients of the first step to at most `max_norm` / 5 with clip_grad_value_.

    Returns of this rank's parts how many elements were `outside`, how many `inside`, and how many are `wrong` now.
    """
    return _of_first_gradients(context, payload, _clipped_by_value)


def _of_first_gradients(context: RankContext, payload: dict[str, Any], measurement: Measurement) -> dict[str, Any]:
    config = rank_config(context, payload)
    with injected(payload["defect"]):
        observer = _AtGradients(measurement, config.optimizer)
        trainer = trainer_with(context, start_process_group(context), config, observer)
        with suppress(Enough):
            trainer.train_step(0)
        destroy_process_group()
    return observer.found


class _AtGradients(Observer):
    def __init__(self, measurement: Measurement, config: OptimizerConfig) -> None:
        self._measurement, self._config = measurement, config
        self.found: dict[str, Any] = {}

    def gradients(self, model: Transformer, *, step: int) -> None:
        self.found = self._measurement(model, self._config)

    def phase(self, name: Phase, *, step: int) -> None:
        if name == "clip":
            raise Enough


def _clipped_by_norm(model: Transformer, config: OptimizerConfig) -> dict[str, Any]:
    if config.norm_order == math.inf:
        local(_gradient(model, AMPLIFIED)).mul_(AMPLIFICATION)
    before = _flat_gradients(model)
    norm = clip_grad_norm_(
        model.parameters(), config.max_norm, norm_type=config.norm_order, foreach=config.foreach_clip
    )
    after = _flat_gradients(model)
    factor = float(before @ after / (before @ before))
    unevenness = float((after - factor * before).norm() / after.norm())
    return {"full": float(full(norm)), "item": norm.item(), "factor": factor, "unevenness": unevenness}


def _clipped_with_bad_numbers(model: Transformer, config: OptimizerConfig) -> dict[str, Any]:
    untouched = [local(grad).clone() for grad in _gradients(model)]
    found = {}
    for does in ("raise", "go-on"):
        for number in (math.nan, math.inf, -math.inf):
            _spoil(_gradient(model, AMPLIFIED), number)
            before = _flat_gradients(model)
            raised, norm = _norm_or_error(model, config, error_if_nonfinite=does == "raise")
            after = _flat_gradients(model)
            changed = int((~(before == after) & ~(before.isnan() & after.isnan())).sum())
            found[f"{does}/{number}"] = {"raised": raised, "changed": changed, "is_finite": math.isfinite(norm)}
            for grad, values in zip(_gradients(model), untouched, strict=True):
                local(grad).copy_(values)
    return found


def _spoil(grad: Tensor, number: float) -> None:
    """The last element of the whole; all ranks that hold copies of it hold the number."""
    assert isinstance(grad, DTensor)
    coordinate = grad.device_mesh.get_coordinate()
    assert coordinate is not None
    sizes = (grad.device_mesh.size(dim) for dim in range(grad.device_mesh.ndim))
    positions = zip(grad.placements, coordinate, sizes, strict=True)
    if all(placement.is_replicate() or index == size - 1 for placement, index, size in positions):
        local(grad).view(-1)[-1] = number


def _norm_or_error(model: Transformer, config: OptimizerConfig, *, error_if_nonfinite: bool) -> tuple[bool, float]:
    try:
        norm = clip_grad_norm_(
            model.parameters(), config.max_norm, norm_type=config.norm_order, error_if_nonfinite=error_if_nonfinite
        )
    except RuntimeError as error:
        if "non-finite" not in str(error):
            raise
        return True, math.nan
    return False, norm.item()


def _clipped_by_value(model: Transformer, config: OptimizerConfig) -> dict[str, Any]:
    limit = config.max_norm / 5
    before = _flat_gradients(model)
    clip_grad_value_(model.parameters(), limit, foreach=config.foreach_clip)
    limit_in_fp32 = float(torch.tensor(limit))
    expected = before.clamp(-limit_in_fp32, limit_in_fp32)
    outside = int((before.abs() > limit_in_fp32).sum())
    wrong = int((_flat_gradients(model) != expected).sum())
    return {"outside": outside, "inside": before.numel() - outside, "wrong": wrong}


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _gradient(model: nn.Module, name: str) -> Tensor:
    grad = model.get_parameter(name).grad
    assert grad is not None
    return grad


def _flat_gradients(model: nn.Module) -> Tensor:
    """This rank's parts of all gradients in one fp64 vector."""
    return torch.cat([local(grad).double().flatten() for grad in _gradients(model)])
