"""Steps of optimizers by the algorithms of their documentation, in numpy: an oracle that shares no code with torch.

https://docs.pytorch.org/docs/stable/optim.html#algorithms has the algorithm of each but ASGD, whose documentation
names a paper (https://doi.org/10.1137/0330046) and its parameters: its rule here is that of torch's releases, so that
only a change of it is seen. Defaults are the documented ones.
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_OF_IMPLEMENTATION = ("foreach", "fused", "differentiable", "capturable", "maximize")
"""Options without effect on the algorithm, or with one that is the same for all."""


def documented_steps(
    optimizer: str, parameter: Array, gradients: Sequence[Array], options: Mapping[str, Any]
) -> Array | None:
    """Return a parameter, of any shape in fp64, after a step with each gradient.

    None if there is no algorithm here of the optimizer, or of an option, which a later torch may add.
    """
    algorithm = _ALGORITHMS.get(optimizer)
    sign = -1.0 if options.get("maximize") else 1.0
    own = {name: value for name, value in options.items() if name not in _OF_IMPLEMENTATION}
    if algorithm is None or not own.keys() <= _options(algorithm):
        return None
    return algorithm(parameter, [sign * gradient for gradient in gradients], **own)


def _options(algorithm: Callable[..., Array]) -> set[str]:
    return {name for name, each in signature(algorithm).parameters.items() if each.kind is Parameter.KEYWORD_ONLY}


def _sgd(
    p: Array,
    gradients: Sequence[Array],
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> Array:
    buffer: Array | None = None
    for gradient in gradients:
        g = gradient + weight_decay * p
        if momentum:
            buffer = g if buffer is None else momentum * buffer + (1 - dampening) * g
            g = g + momentum * buffer if nesterov else buffer
        p = p - lr * g
    return p


def _adam(
    p: Array,
    gradients: Sequence[Array],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    decoupled_weight_decay: bool = False,
) -> Array:
    m = v = largest = np.zeros_like(p)
    for t, gradient in enumerate(gradients, 1):
        p, g = _decayed(p, gradient, lr * weight_decay, weight_decay, is_decoupled=decoupled_weight_decay)
        m, v = _moments(m, v, g, betas)
        largest = np.maximum(largest, v) if amsgrad else v
        p = p - lr * (m / (1 - betas[0] ** t)) / (np.sqrt(largest / (1 - betas[1] ** t)) + eps)
    return p


def _adamw(
    p: Array,
    gradients: Sequence[Array],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
) -> Array:
    options: dict[str, Any] = {"weight_decay": weight_decay, "amsgrad": amsgrad, "decoupled_weight_decay": True}
    return _adam(p, gradients, lr=lr, betas=betas, eps=eps, **options)


def _adamax(
    p: Array,
    gradients: Sequence[Array],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Array:
    m = u = np.zeros_like(p)
    for t, gradient in enumerate(gradients, 1):
        g = gradient + weight_decay * p
        m = betas[0] * m + (1 - betas[0]) * g
        u = np.maximum(betas[1] * u, np.abs(g) + eps)
        p = p - lr * m / ((1 - betas[0] ** t) * u)
    return p


def _nadam(
    p: Array,
    gradients: Sequence[Array],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
) -> Array:
    def mu(t: int) -> float:
        return betas[0] * (1 - 0.5 * float(0.96 ** (t * momentum_decay)))

    m = v = np.zeros_like(p)
    product = 1.0
    for t, gradient in enumerate(gradients, 1):
        p, g = _decayed(p, gradient, lr * weight_decay, weight_decay, is_decoupled=decoupled_weight_decay)
        m, v = _moments(m, v, g, betas)
        product *= mu(t)
        mean = mu(t + 1) * m / (1 - product * mu(t + 1)) + (1 - mu(t)) * g / (1 - product)
        p = p - lr * mean / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
    return p


def _radam(
    p: Array,
    gradients: Sequence[Array],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
) -> Array:
    m = v = np.zeros_like(p)
    limit = 2 / (1 - betas[1]) - 1
    for t, gradient in enumerate(gradients, 1):
        p, g = _decayed(p, gradient, lr * weight_decay, weight_decay, is_decoupled=decoupled_weight_decay)
        m, v = _moments(m, v, g, betas)
        mean, decay = m / (1 - betas[0] ** t), betas[1] ** t
        rho = limit - 2 * t * decay / (1 - decay)
        if rho > 5:
            rectified = (rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho)
            mean = mean * np.sqrt(rectified) * np.sqrt(1 - decay) / (np.sqrt(v) + eps)
        p = p - lr * mean
    return p


def _adagrad(
    p: Array,
    gradients: Sequence[Array],
    *,
    lr: float,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
) -> Array:
    total = np.full_like(p, initial_accumulator_value)
    for t, gradient in enumerate(gradients, 1):
        g = gradient + weight_decay * p
        total = total + g**2
        p = p - lr / (1 + (t - 1) * lr_decay) * g / (np.sqrt(total) + eps)
    return p


def _adadelta(
    p: Array,
    gradients: Sequence[Array],
    *,
    lr: float,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
) -> Array:
    v = u = np.zeros_like(p)
    for gradient in gradients:
        g = gradient + weight_decay * p
        v = rho * v + (1 - rho) * g**2
        change = np.sqrt(u + eps) / np.sqrt(v + eps) * g
        u = rho * u + (1 - rho) * change**2
        p = p - lr * change
    return p


def _rmsprop(
    p: Array,
    gradients: Sequence[Array],
    *,
    lr: float,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
) -> Array:
    v = mean = buffer = np.zeros_like(p)
    for gradient in gradients:
        g = gradient + weight_decay * p
        v = alpha * v + (1 - alpha) * g**2
        mean = alpha * mean + (1 - alpha) * g
        scaled = g / (np.sqrt(v - mean**2 if centered else v) + eps)
        buffer = momentum * buffer + scaled
        p = p - lr * buffer
    return p


def _rprop(
    p: Array,
    gradients: Sequence[Array],
    *,
    lr: float,
    etas: tuple[float, float] = (0.5, 1.2),
    step_sizes: tuple[float, float] = (1e-6, 50.0),
) -> Array:
    before, size = np.zeros_like(p), np.full_like(p, lr)
    for gradient in gradients:
        agreement = before * gradient
        grown, shrunk = np.minimum(size * etas[1], step_sizes[1]), np.maximum(size * etas[0], step_sizes[0])
        size = np.where(agreement > 0, grown, np.where(agreement < 0, shrunk, size))
        before = np.where(agreement < 0, 0.0, gradient)
        p = p - size * np.sign(before)
    return p


def _asgd(
    p: Array,
    gradients: Sequence[Array],
    *,
    lr: float,
    lambd: float = 1e-4,
    alpha: float = 0.75,
    weight_decay: float = 0.0,
    t0: float = 1e6,
) -> Array:
    """Step at a rate that falls by a power, with decay by `lambd`; `t0` is for the average, which is no parameter."""
    for t, gradient in enumerate(gradients):
        rate = lr / (1 + lambd * lr * t) ** alpha
        p = p * (1 - lambd * rate) - rate * (gradient + weight_decay * p)
    return p


def _adafactor(
    p: Array,
    gradients: Sequence[Array],
    *,
    lr: float,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
) -> Array:
    least = float(np.finfo(np.float64).eps) if eps[0] is None else eps[0]
    rows = columns = v = 0.0
    for t, g in enumerate(gradients, 1):
        fresh = t**beta2_decay
        rate = max(eps[1], _rms(p)) * min(lr, t**-0.5)
        p = p * (1 - lr * weight_decay)
        if g.ndim > 1:
            rows = (1 - fresh) * rows + fresh * (g**2).sum(-1, keepdims=True)
            columns = (1 - fresh) * columns + fresh * (g**2).sum(-2, keepdims=True)
            v = rows * columns / np.maximum(np.sum(rows, -2, keepdims=True), least)
        else:
            v = (1 - fresh) * v + fresh * g**2
        update = g / np.maximum(np.sqrt(v), least)
        p = p - rate * update / max(1.0, _rms(update) / d)
    return p


def _muon(
    p: Array,
    gradients: Sequence[Array],
    *,
    lr: float,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> Array:
    """Step by a matrix that is nearly orthogonal, which torch computes in bf16.

    Momentum is an average in torch, and so the documented sum times 1 - `momentum`; of that `eps` alone makes a
    difference.
    """
    buffer = np.zeros_like(p)
    rows, columns = p.shape
    adjusted = 0.2 * max(rows, columns) ** 0.5 if adjust_lr_fn == "match_rms_adamw" else max(1.0, rows / columns) ** 0.5
    for g in gradients:
        buffer = momentum * buffer + g
        direction = (1 - momentum) * (g + momentum * buffer if nesterov else buffer)
        p = p * (1 - lr * weight_decay) - lr * adjusted * _newton_schulz(direction, ns_coefficients, ns_steps, eps)
    return p


def _newton_schulz(matrix: Array, coefficients: tuple[float, float, float], steps: int, eps: float) -> Array:
    """Return a matrix whose singular values the odd polynomial has moved towards 1, so many times."""
    a, b, c = coefficients
    x = matrix / max(float(np.linalg.norm(matrix)), eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _decayed(p: Array, gradient: Array, decoupled: float, coupled: float, *, is_decoupled: bool) -> tuple[Array, Array]:
    """Return parameter and gradient after weight decay: of the parameter by itself, or by the gradient."""
    return (p - decoupled * p, gradient) if is_decoupled else (p, gradient + coupled * p)


def _moments(m: Array, v: Array, g: Array, betas: tuple[float, float]) -> tuple[Array, Array]:
    return betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2


def _rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2)))


_ALGORITHMS: dict[str, Callable[..., Array]] = {
    "ASGD": _asgd,
    "Adadelta": _adadelta,
    "Adafactor": _adafactor,
    "Adagrad": _adagrad,
    "Adam": _adam,
    "AdamW": _adamw,
    "Adamax": _adamax,
    "Muon": _muon,
    "NAdam": _nadam,
    "RAdam": _radam,
    "RMSprop": _rmsprop,
    "Rprop": _rprop,
    "SGD": _sgd,
}
