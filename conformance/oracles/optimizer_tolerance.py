"""Bounds on rounding errors of the optimizer's state and of parameters, derived as in `tolerance`."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from conformance.bound import EXACT, Bound, bound
from conformance.oracles.frozen import first_of_each
from conformance.oracles.reference import ReferenceRun, clip_factor
from conformance.oracles.tolerance import FP32_ROUNDOFF, clipped_gradients, norm, norm_condition
from reference_trainer.config import OptimizerConfig

_ROUNDINGS_PER_STEP = 10
"""Number of roundings in an optimizer's step, see `_replayed_steps`."""


def updates(gradient_error: Bound, reference: ReferenceRun, config: OptimizerConfig) -> dict[str, Bound]:
    """Return the relative error of each parameter's total change, from that of the gradients.

    An error e g_rms in every element of a gradient changes AdamW's first step g / (|g| + eps) by e g_rms times its
    derivative eps / (|g| + eps)^2; later steps, averages over more gradients, are less sensitive. The steps' errors
    are added: the total change is at most the sum of the steps. SGD is linear, its sensitivity is 1; with momentum it
    is that of a weighted sum of all gradients, see `_weighted_sum_condition`.
    Clipping scales by the norm, whose error is another e times `norm_condition`. Each step also rounds the new
    parameter to fp32, by up to u of the parameter's size, which counts where the change is small compared with the
    parameter (norm weights near 1).
    """
    if config.momentum:
        return _momentum_updates(gradient_error, reference, config)
    clip = clip_factor(reference.grad_norms[0], max_norm=config.max_norm)
    terms: dict[str, float | Bound] = {
        "steps": len(reference.gradients),
        "e": gradient_error,
        "c": norm_condition(reference.gradients[0], order=config.norm_order),
        "u": FP32_ROUNDOFF,
    }
    bounds = {
        name: Bound(
            "steps * (e * (c + s) + u * q)",
            terms | {"s": _sensitivity(clip * grad.double(), config), "q": _size_over_change(reference, name)},
        )
        for name, grad in first_of_each(reference.gradients).items()
    }
    return _exact_without_gradients(reference) | bounds


def _exact_without_gradients(reference: ReferenceRun) -> dict[str, Bound]:
    """Return exact bounds of all parameters: those that never train keep every bit."""
    return dict.fromkeys(reference.parameters, EXACT)


def _momentum_updates(gradient_error: Bound, reference: ReferenceRun, config: OptimizerConfig) -> dict[str, Bound]:
    terms: dict[str, float | Bound] = {
        "steps": len(reference.gradients),
        "m": clipped_gradients(gradient_error, reference.gradients[0], order=config.norm_order),
        "u": FP32_ROUNDOFF,
    }
    bounds = {
        name: Bound("steps * (m * k + u * q)", terms | {"k": k, "q": _size_over_change(reference, name)})
        for name, k in _conditions_of_change(reference, config).items()
    }
    return _exact_without_gradients(reference) | bounds


def _conditions_of_change(reference: ReferenceRun, config: OptimizerConfig) -> dict[str, float]:
    """Return by parameter the condition of the total change of SGD with momentum, the sum of all buffers times rates.

    The gradient of a step is in the buffer of the n-th step after it momentum^n times.
    """
    rates = reference.rates
    weights = [
        sum(rate * config.momentum**later for later, rate in enumerate(rates[step:])) for step in range(len(rates))
    ]
    changes = {name: reference.parameters[name].double() - p.double() for name, p in reference.initial.items()}
    return _weighted_sum_condition(reference, config, weights=weights, total=changes)


def _conditions_of_buffer(reference: ReferenceRun, config: OptimizerConfig) -> dict[str, float]:
    """Return by parameter the condition of the momentum buffer: a gradient n steps ago counts momentum^n times."""
    steps = len(reference.gradients)
    weights = [config.momentum ** (steps - 1 - step) for step in range(steps)]
    buffers = reference.optimizer_state["momentum_buffer"]
    return _weighted_sum_condition(reference, config, weights=weights, total=buffers)


def _weighted_sum_condition(
    reference: ReferenceRun, config: OptimizerConfig, *, weights: Sequence[float], total: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return by parameter the relative error of a weighted sum over that of its terms: sum of sizes over size of sum.

    The term of a step is its clipped gradient and the decay of the parameter, `gradient + decay p`; p is at most as
    large as the larger of its first and last values, if its size is monotonic.
    """
    factors = [clip_factor(norm, max_norm=config.max_norm) for norm in reference.grad_norms]
    conditions = {}
    trained = first_of_each(reference.gradients)
    for name, end in ((name, end) for name, end in total.items() if name in trained):
        first, last = reference.initial[name].double(), reference.parameters[name].double()
        decay = config.weight_decay * float(max(first.norm(), last.norm())) if first.ndim >= 2 else 0.0
        sizes = (
            weight * (factor * float(gradients[name].double().norm()) + decay)
            for weight, factor, gradients in zip(weights, factors, reference.gradients, strict=True)
            if name in gradients
        )
        conditions[name] = sum(sizes) / float(end.double().norm())
    return conditions


def _size_over_change(reference: ReferenceRun, name: str) -> float:
    final = reference.parameters[name].double()
    return float(final.norm() / (final - reference.initial[name].double()).norm())


def _sensitivity(gradient: Tensor, config: OptimizerConfig) -> float:
    """Relative error of the optimizer's step over that of the gradient, in the root mean square."""
    if config.name == "sgd":
        return 1.0
    size = gradient.abs()
    derivative = config.eps / (size + config.eps).square()
    step = size / (size + config.eps)
    return _rms(size) * _rms(derivative) / _rms(step)


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def moments(
    gradient_error: Bound, reference: ReferenceRun, config: OptimizerConfig
) -> Mapping[str, Bound | Mapping[str, Bound]]:
    """Return the relative error of the optimizer's state, by kind or by kind and parameter.

    AdamW's is linear and quadratic in the clipped gradients, the buffer of SGD with momentum a weighted sum of them.
    """
    error = clipped_gradients(gradient_error, reference.gradients[0], order=config.norm_order)
    if config.momentum:
        conditions = _conditions_of_buffer(reference, config)
        return {"momentum_buffer": {name: bound("m * k", m=error, k=k) for name, k in conditions.items()}}
    return {"exp_avg": error, "exp_avg_sq": bound("2 * m", m=error)}


def replayed_updates(reference: ReferenceRun, config: OptimizerConfig) -> dict[str, Bound]:
    """Return the relative error of each parameter's total change, given the gradients that were applied.

    Each step adds its error (see `_replayed_steps`) and rounds the new parameter to fp32.
    """
    terms: dict[str, float | Bound] = {
        "r": _replayed_steps(reference, config),
        "steps": len(reference.gradients),
        "u": FP32_ROUNDOFF,
    }
    qs = {name: _size_over_change(reference, name) for name in first_of_each(reference.gradients)}
    exact = _exact_without_gradients(reference)
    if config.momentum:
        conditions = _conditions_of_change(reference, config)
        return exact | {
            name: Bound("r * k + steps * u * q", {**terms, "k": conditions[name], "q": q}) for name, q in qs.items()
        }
    return exact | {name: Bound("r + steps * u * q", {**terms, "q": q}) for name, q in qs.items()}


def replayed_state(reference: ReferenceRun, config: OptimizerConfig) -> Bound | dict[str, Bound]:
    """Return the relative error of the optimizer's state, given the gradients that were applied, see `_replayed_steps`.

    For SGD with momentum by parameter: the buffer is a sum of terms that may cancel.
    """
    steps = _replayed_steps(reference, config)
    if not config.momentum:
        return steps
    return {name: bound("r * k", r=steps, k=k) for name, k in _conditions_of_buffer(reference, config).items()}


def _replayed_steps(reference: ReferenceRun, config: OptimizerConfig) -> Bound:
    """Return the relative error of the optimizer's steps, given the gradients that were applied.

    A step rounds some ten times, each relative to the rounded number (products, quotients and roots: no cancellation
    but in the first moment's average), and the gradient norm is a sum over all elements. The steps' errors are added.

    Ten covers all implementations. AdamW rounds an element 13 times between gradient and step, one by one or in lists
    (torch/optim/adam.py), 12 times if fused (aten/src/ATen/native/cpu/FusedAdamKernel.cpp); SGD with momentum 6 times.
    At most 5 of them round scalars such as 1 - beta, equally for all elements; the others are independent, so that in
    the norm of a tensor n of them count as sqrt(n): 5 + sqrt(8) is below 10.
    """
    clip_error = norm(reference.gradients[0], order=config.norm_order) if config.max_norm > 0 else EXACT
    return bound(
        "steps * (u * roundings + n)",
        steps=len(reference.gradients),
        u=FP32_ROUNDOFF,
        roundings=_ROUNDINGS_PER_STEP,
        n=clip_error,
    )
