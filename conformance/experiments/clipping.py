"""Clipping of gradients, finite or not, by the trainer and by torch itself, and loss scaling after an overflow.

`NonFiniteInjector` puts non-finite numbers into the gradients of one rank.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from conformance.experiments.context import RankWorld, experiment
from conformance.instruments.capture import fingerprint
from conformance.instruments.sharding import full, local
from conformance.run.experiment import Needs, Result
from reference_trainer.config import OptimizerConfig
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer, Phase
from reference_trainer.train import Trainer


class ClippingReached(Exception):
    """Clipping is over, and the step ends here: no later collective leaves a rank waiting for another."""


class NonFiniteInjector(Observer):
    """Observer that puts `value` into a gradient of an `active` rank, at the point in time that `when` names.

    `backward`: into all elements of the gradient that backward of the rank's first block is given. `scaled` and
    `reduced`: into the first element of the shard of a reduced gradient, before or after unscaling; the parameter is
    `name`, or any parameter whose shard is not empty.
    """

    def __init__(self, *, active: bool) -> None:
        self._active = active
        self._model: Transformer | None = None
        self.when: Literal["never", "backward", "scaled", "reduced"] = "never"
        self.value = 0.0
        self.name: str | None = None

    def initialized(self, model: Transformer) -> None:
        """Remember the model, and register a hook on its first block."""
        self._model = model
        next(iter(model.blocks.values())).register_forward_hook(self._hook_backward)

    def phase(self, name: Phase, *, step: int) -> None:
        """Change a gradient that is still scaled."""
        if name == "unscale" and self.when == "scaled" and self._model is not None:
            self._change_shard(self._model)

    def gradients(self, model: Transformer, *, step: int) -> None:
        """Change a gradient that is not clipped yet."""
        if self.when == "reduced":
            self._change_shard(model)

    def _change_shard(self, model: Transformer) -> None:
        if not self._active:
            return
        named = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
        shards = (local(grad) for name, grad in named if self.name in (None, name))
        next(shard for shard in shards if shard.numel()).view(-1)[0] = self.value

    def _hook_backward(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if self._active and self.when == "backward":
            output.register_hook(lambda grad: torch.full_like(grad, self.value))  # type: ignore[no-untyped-call]


_WHEN: tuple[Literal["backward", "reduced"], ...] = ("backward", "reduced")


class ClipOutcome(msgspec.Struct):
    """Outcome of clipping on one rank."""

    raised: bool
    """True if the trainer raised an error because a number was not finite."""
    norm_is_finite: bool
    """True if the norm that the trainer logged last was finite."""


@experiment(needs=Needs.TRAINING)
def clip_non_finite(rank: RankWorld) -> dict[str, ClipOutcome]:
    """Make gradients of the last rank non-finite and clip them, in several situations.

    The name of a situation consists of the trainer's setting (`raise` or `go-on`), the point in time at which the
    gradient is changed, and the value, such as `raise/backward/nan`.
    """
    outcomes = {}
    for setting in ("raise", "go-on"):
        optimizer = replace(rank.config.optimizer, error_if_nonfinite=setting == "raise")
        injector = _StopAfterClipping(active=rank.is_last)
        trainer = rank.trainer(injector, config=replace(rank.config, optimizer=optimizer))
        for when in _WHEN:
            for value in (math.nan, math.inf):
                injector.when, injector.value = when, value
                raised = _raises(trainer)
                outcomes[f"{setting}/{when}/{value}"] = ClipOutcome(raised, injector.norm_is_finite)
                trainer.optimizer.zero_grad()
    return outcomes


class _StopAfterClipping(NonFiniteInjector):
    """Injector that ends the step once gradients are clipped, and records whether the norm was finite."""

    def __init__(self, *, active: bool) -> None:
        super().__init__(active=active)
        self.norm_is_finite = True

    def clipped(self, model: Transformer, *, norm: Tensor, step: int) -> None:
        self.norm_is_finite = bool(norm.isfinite())
        raise ClippingReached


def _raises(trainer: Trainer) -> bool:
    """Return whether clipping in the first step raises because of a number that is not finite."""
    try:
        trainer.train_step(0)
    except ClippingReached:
        return False
    except RuntimeError as error:
        if "finite" not in str(error):
            raise
        return True
    raise RuntimeError("a step has ended without clipping")


AMPLIFIED, AMPLIFICATION = "tok_embeddings.weight", 1024.0
"""Parameter whose gradient is multiplied before torch clips by the maximum norm, and the factor.

Then a gradient that every mesh shards has the largest element of all gradients, so that only one rank knows the norm
without communication, with any seed.
"""


class NormClipping(msgspec.Struct):
    """Outcome of clipping by the norm on one rank."""

    full: float
    """Returned norm by `full_tensor()`."""
    item: float
    """Returned norm by `item()`."""
    factor: float
    """Factor by which this rank's shards were scaled."""
    unevenness: float
    """Relative deviation of the scaled shards from one factor for all."""
    norm_alone: float
    """Norm of one parameter's gradient, computed from its full elements."""
    factor_alone: float
    """Factor by which it was scaled when it was clipped alone, to half of its norm."""


class NonFiniteClipping(msgspec.Struct):
    """Outcome of clipping non-finite gradients by the norm, on one rank."""

    raised: bool
    changed: int
    """Number of elements of this rank's shards that clipping has changed."""
    norm_is_finite: bool


class ValueClipping(msgspec.Struct):
    """Numbers of elements of one rank's shards in clipping by value."""

    outside: int
    """Number of elements that were outside the limit."""
    inside: int
    """Number of elements that were inside the limit."""
    wrong: int
    """Number of elements with a wrong value afterwards."""


@experiment(needs=Needs.TRAINING)
def clip_grad_norm(rank: RankWorld) -> NormClipping:
    """Clip the gradients of the first step with clip_grad_norm_, as a user without this trainer would.

    For the maximum norm one gradient is multiplied first, see `AMPLIFIED`.
    """
    return _with_first_gradients(rank, _clipped_by_norm)


@experiment(needs=Needs.TRAINING)
def clip_grad_norm_of_non_finite(rank: RankWorld) -> dict[str, NonFiniteClipping]:
    """Clip gradients with clip_grad_norm_ after the last element of one that every mesh shards is made non-finite.

    The name of a situation consists of torch's setting (`raise` or `go-on`) and the number, such as `raise/nan`.
    """
    return _with_first_gradients(rank, _clipped_non_finite)


@experiment(needs=Needs.TRAINING)
def clip_grad_value(rank: RankWorld) -> ValueClipping:
    """Clip each element of the gradients of the first step to half of the largest one with clip_grad_value_."""
    return _with_first_gradients(rank, _clipped_by_value)


def _with_first_gradients(rank: RankWorld, measure: Callable[[Transformer, OptimizerConfig], Result]) -> Result:
    """Return the result of `measure` on a model with the reduced gradients of its first step."""
    observer = _AtGradients(measure, rank.config.optimizer)
    trainer = rank.trainer(observer)
    with suppress(ClippingReached):
        trainer.train_step(0)
    result: Result = observer.result
    return result


class _AtGradients(Observer):
    def __init__(self, measure: Callable[[Transformer, OptimizerConfig], Any], config: OptimizerConfig) -> None:
        self._measure, self._config = measure, config
        self.result: Any = None

    def gradients(self, model: Transformer, *, step: int) -> None:
        self.result = self._measure(model, self._config)

    def phase(self, name: Phase, *, step: int) -> None:
        if name == "clip":
            raise ClippingReached


def _clipped_by_norm(model: Transformer, config: OptimizerConfig) -> NormClipping:
    if config.norm_order == math.inf:
        local(_gradient(model, AMPLIFIED)).mul_(AMPLIFICATION)
    before = _flat_gradients(model)
    norm = clip_grad_norm_(
        model.parameters(), config.max_norm, norm_type=config.norm_order, foreach=config.foreach_clip
    )
    after = _flat_gradients(model)
    factor = _factor(before, after)
    unevenness = float((after - factor * before).norm() / after.norm())
    norm_alone, factor_alone = _clipped_alone(model, config)
    return NormClipping(float(full(norm)), norm.item(), factor, unevenness, norm_alone, factor_alone)


def _clipped_alone(model: Transformer, config: OptimizerConfig) -> tuple[float, float]:
    """Clip one parameter, which clip_grad_norm_ is given itself and not in a list, to half of its norm."""
    grad = _gradient(model, AMPLIFIED)
    before = full(grad).double().flatten()
    norm = float(torch.linalg.vector_norm(before, config.norm_order))
    clip_grad_norm_(model.get_parameter(AMPLIFIED), norm / 2, norm_type=config.norm_order, foreach=config.foreach_clip)
    return norm, _factor(before, full(grad).double().flatten())


def _factor(before: Tensor, after: Tensor) -> float:
    """Return the factor of two vectors that are multiples of each other."""
    return float(before @ after / (before @ before))


def _clipped_non_finite(model: Transformer, config: OptimizerConfig) -> dict[str, NonFiniteClipping]:
    untouched = [local(grad).clone() for grad in _gradients(model)]
    outcomes = {}
    for setting in ("raise", "go-on"):
        for number in (math.nan, math.inf, -math.inf):
            _set_last_element(_gradient(model, AMPLIFIED), number)
            before = _flat_gradients(model)
            raised, norm = _norm_or_error(model, config, error_if_nonfinite=setting == "raise")
            after = _flat_gradients(model)
            changed = int((~(before == after) & ~(before.isnan() & after.isnan())).sum())
            outcomes[f"{setting}/{number}"] = NonFiniteClipping(raised, changed, math.isfinite(norm))
            for grad, values in zip(_gradients(model), untouched, strict=True):
                local(grad).copy_(values)
    return outcomes


def _set_last_element(grad: Tensor, number: float) -> None:
    """Set the last element of the full gradient, on all ranks that hold a copy."""
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
            model.parameters(),
            config.max_norm,
            norm_type=config.norm_order,
            error_if_nonfinite=error_if_nonfinite,
            foreach=config.foreach_clip,
        )
    except RuntimeError as error:
        if "non-finite" not in str(error):
            raise
        return True, math.nan
    return False, norm.item()


def _clipped_by_value(model: Transformer, config: OptimizerConfig) -> ValueClipping:
    before = _flat_gradients(model)
    largest = before.abs().amax()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    limit = float(largest) / 2  # of all ranks; numbers of fp32 or less, exact in half
    # Plain tensors: kernels compare in fp32 and round the limit to the gradient's dtype.
    clamped = [local(grad).float().clamp(-limit, limit).to(grad.dtype) for grad in _gradients(model)]
    expected = torch.cat([grad.double().flatten() for grad in clamped])
    clip_grad_value_(model.parameters(), limit, foreach=config.foreach_clip)
    outside = int((before.abs() > limit).sum())
    wrong = int((_flat_gradients(model) != expected).sum())
    return ValueClipping(outside=outside, inside=before.numel() - outside, wrong=wrong)


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _gradient(model: nn.Module, name: str) -> Tensor:
    grad = model.get_parameter(name).grad
    assert grad is not None
    return grad


def _flat_gradients(model: nn.Module) -> Tensor:
    """Return this rank's shards of all gradients in one vector, float64."""
    return torch.cat([local(grad).double().flatten() for grad in _gradients(model)])


_CHANGED_GRADIENTS = ("tok_embeddings.weight", "norm.weight")
_ANY_GRADIENT = (None,)
"""Any of the last rank's: with a pipeline it depends on the schedule which layers the rank has."""


class OverflowOutcome(msgspec.Struct):
    """Reaction of one rank to a step in which a gradient has overflowed on the last rank, and to the step after."""

    skipped: bool
    """True if the step was skipped."""
    scale_before: float
    """Loss scale of the step."""
    scale: float
    """Loss scale of the step after."""
    changed: list[str]
    """Names of parameters and optimizer state that the step changed."""
    changed_next: list[str]
    """Names of parameters and optimizer state that the step after changed."""


@experiment(needs=Needs.TRAINING)
def overflow_on_last_rank(rank: RankWorld) -> dict[str, OverflowOutcome]:
    """Make a reduced gradient of the last rank non-finite and train on; returns outcomes, such as for `inf in NAME`."""
    injector = NonFiniteInjector(active=rank.is_last)
    trainer = rank.trainer(injector)
    trainer.train_step(0)
    outcomes: dict[str, OverflowOutcome] = {}
    for name in _CHANGED_GRADIENTS if rank.config.mesh.pp == 1 else _ANY_GRADIENT:
        for value in (math.inf, math.nan):
            before = _state(trainer)
            injector.when, injector.name, injector.value = "scaled", name, value
            overflowed = trainer.train_step(2 * len(outcomes) + 1)
            injector.when = "never"
            between = _state(trainer)
            following = trainer.train_step(2 * len(outcomes) + 2)
            outcomes[f"{value} in {name or 'a gradient'}"] = OverflowOutcome(
                skipped=overflowed.skipped,
                scale_before=overflowed.loss_scale,
                scale=following.loss_scale,
                changed=_changed(before, between),
                changed_next=_changed(between, _state(trainer)),
            )
    return outcomes


def _state(trainer: Trainer) -> dict[str, str]:
    """Return fingerprints of this rank's shards of parameters and optimizer state, by name."""
    fingerprints = {}
    for name, parameter in trainer.model.named_parameters():
        fingerprints[name] = fingerprint(local(parameter.detach()))
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                fingerprints[f"{name} {key}"] = fingerprint(local(value))
    return fingerprints


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return sorted(name for name in before | after if before.get(name) != after.get(name))
