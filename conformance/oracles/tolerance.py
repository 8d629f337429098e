"""Bounds on rounding errors, derived from the computation and not from what was measured.

Model (N. J. Higham, T. Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5),
2019, theorem 3.1): an inner product of length n in arithmetic of unit roundoff u has, with high probability, an error
of at most about sqrt(n) u relative to its terms. Errors of successive stages are added, as if all pointed the same way.
A deviation is a Frobenius norm relative to that of the whole tensor, so single nearly cancelled elements do not count.
docs/tolerances.md tells how far the bounds are from correct programs and from defects.
"""

from collections.abc import Mapping
from math import sqrt

from torch import Tensor

from conformance.oracles.reference import ReferenceRun, clip_factor
from reference_trainer.config import ModelConfig, OptimizerConfig, TrainerConfig

FP32_ROUNDOFF = 2.0**-24
_ROUNDINGS_PER_STEP = 10


def forward_stages(model: ModelConfig, *, seq_len: int) -> float:
    """Sum of sqrt(n) over the reductions that a token passes on its way to the loss."""
    attention = 3 * sqrt(model.dim) + sqrt(model.head_dim) + sqrt(seq_len)  # norm, q/k/v, output; scores; values
    feed_forward = 2 * sqrt(model.dim) + sqrt(model.ffn_dim)  # norm, up and gate; down
    head = 2 * sqrt(model.dim) + sqrt(model.vocab_size)  # norm, output; softmax
    return model.n_layers * (attention + feed_forward) + head


def fp32_loss(config: TrainerConfig) -> float:
    """Relative error of the mean loss: the forward pass and the sum over the tokens of a step."""
    tokens = config.data.global_batch_size * config.data.seq_len
    return FP32_ROUNDOFF * (forward_stages(config.model, seq_len=config.data.seq_len) + sqrt(tokens))


def fp32_gradients(config: TrainerConfig) -> float:
    """Relative error of a gradient: backward repeats each forward product twice, then sums over the tokens.

    It bounds the total norm as well: norms differ by at most the norm of the difference.
    """
    tokens = config.data.global_batch_size * config.data.seq_len
    return FP32_ROUNDOFF * (3 * forward_stages(config.model, seq_len=config.data.seq_len) + sqrt(tokens))


def updates(gradient_error: float, reference: ReferenceRun, config: OptimizerConfig) -> dict[str, float]:
    """Relative error of each parameter's total change, from that of the gradients and the optimizer's sensitivity.

    An error e g_rms in every element of a gradient changes AdamW's first step g / (|g| + eps) by e g_rms times its
    derivative eps / (|g| + eps)^2; later steps, averages over more gradients, are less sensitive. The steps' errors
    are added: the total change is at most the sum of the steps. SGD is linear, its sensitivity is 1.
    Clipping scales by the norm, whose error is another e. Each step also rounds the new parameter to fp32, by up to u
    of its own size, which counts where the change is small beside the parameter (norm weights near 1).
    """
    steps = len(reference.gradients)
    clip = clip_factor(reference.grad_norms[0], max_norm=config.max_norm)
    sensitivity = {name: _sensitivity(clip * grad.double(), config) for name, grad in reference.gradients[0].items()}
    stored = {name: FP32_ROUNDOFF * _size_over_change(reference, name) for name in sensitivity}
    return {name: steps * (gradient_error * (1.0 + factor) + stored[name]) for name, factor in sensitivity.items()}


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


def moments(gradient_error: float) -> Mapping[str, float]:
    """Relative error of AdamW's state: linear and quadratic in the gradients, with the clip factor's error."""
    return {"exp_avg": 2 * gradient_error, "exp_avg_sq": 4 * gradient_error}


def fp32_average(terms: int) -> float:
    """Relative error of an average in fp32 whose terms are given, such as a reduced gradient.

    Two terms have one sum whatever their order. Beyond, (terms - 1) additions in an order of the backend's choice;
    sqrt(terms) is the ratio of the terms' sizes to that of their sum if they are independent.
    """
    return (terms - 1) * FP32_ROUNDOFF * sqrt(terms) if terms > 2 else 0.0


def replayed_updates(reference: ReferenceRun, config: OptimizerConfig) -> dict[str, float]:
    """Relative error of each parameter's total change, given the gradients that were applied.

    A step rounds some ten times, each relative to what is rounded (products, quotients and roots: no cancellation but
    in the first moment's average), the gradient norm is a sum over all elements, and the new parameter is rounded to
    fp32. The steps' errors are added.
    """
    elements = sum(grad.numel() for grad in reference.gradients[0].values())
    step_error = FP32_ROUNDOFF * (_ROUNDINGS_PER_STEP + (sqrt(elements) if config.max_norm > 0 else 0.0))
    steps = len(reference.gradients)
    return {
        name: steps * (step_error + FP32_ROUNDOFF * _size_over_change(reference, name)) for name in reference.parameters
    }
