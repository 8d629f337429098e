"""Bounds on rounding errors, derived from the computation and not from measurements.

Model (N. J. Higham, T. Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5),
2019, theorem 3.1): an inner product of length n in arithmetic of unit roundoff u has, with high probability, an error
of at most about sqrt(n) u relative to its terms. Errors of successive stages are added, as if all pointed the same way.
A deviation is a Frobenius norm relative to that of the full tensor, so single nearly cancelled elements do not count.
Each bound is a formula over terms (`conformance.bound.Bound`), which reports show; a name stands for one number in a
bound and the bounds inside of it. docs/tolerances.md has the distance of the bounds from correct programs and from
defects. Bounds for the optimizer are in `optimizer_tolerance`.

Where a function takes gradients, they are tensors of any shape and floating-point dtype by parameter name.
"""

from collections.abc import Mapping
from functools import reduce
from math import inf, log, log2, sqrt
from operator import add

import torch
from torch import Tensor

from conformance.bound import EXACT, Bound, bound
from conformance.oracles.dtype_policy import FP16, dtype_policy
from conformance.oracles.emulation import Emulation
from conformance.oracles.reference import total_norm
from conformance.oracles.schedule import backward_count, gradient_sync, reduces_twice
from reference_trainer.config import ModelConfig, TrainerConfig

FP32_ROUNDOFF = 2.0**-24
FP16_ROUNDOFF = 2.0**-11
TF32_ROUNDOFF = 2.0**-11
FP16_SMALLEST = 2.0**-24
"""Spacing of fp16 numbers below 2^-14: rounding there errs by at most half of it, however small the number."""


_ROUNDINGS_OF_A_MERGE = 4
"""Weight, difference, product and difference, see `virtual_cp`."""


def forward_stages(model: ModelConfig, *, seq_len: int, cp: int = 1) -> float:
    """Return the sum of sqrt(n) over the reductions, of length n each, that a token passes on its way to the loss.

    With context parallelism attention is merged from those of `cp` ranks, a chain of roundings of convex combinations.
    """
    attention = 3 * sqrt(model.dim) + sqrt(model.head_dim) + sqrt(seq_len)  # norm, q/k/v, output; scores; values
    attention += sqrt(_ROUNDINGS_OF_A_MERGE * (cp - 1))
    feed_forward = 2 * sqrt(model.dim) + sqrt(model.ffn_dim)  # norm, up and gate; down
    if model.n_experts:
        feed_forward += sqrt(model.dim) + sqrt(model.n_experts) + sqrt(model.experts_per_token)  # router; softmax; sum
    head = 2 * sqrt(model.dim) + sqrt(model.vocab_size)  # norm, output; softmax
    return model.n_layers * (attention + feed_forward) + head


def fp32_loss(config: TrainerConfig) -> Bound:
    """Return the relative error of the mean loss: the forward pass and the sum over the tokens of a step."""
    return _fp32("u * (F + sqrt(tokens))", config)


def fp32_gradients(config: TrainerConfig) -> Bound:
    """Return the relative error of a gradient: backward repeats each forward product twice, then sums over the tokens.

    The bound holds for the total 2-norm as well: norms differ by at most the norm of the difference. For other norms
    see `norm_condition`.
    """
    return _fp32("u * (3 * F + sqrt(tokens))", config, tf32="3 * T")


def _fp32(formula: str, config: TrainerConfig, *, tf32: str = "T") -> Bound:
    terms: dict[str, float | Bound] = {"u": FP32_ROUNDOFF, **_lengths(config)}
    return Bound(f"{formula} + {tf32}", terms | {"T": _tf32_forward(config)}) if config.tf32 else Bound(formula, terms)


def _lengths(config: TrainerConfig) -> dict[str, float]:
    """Terms from lengths of sums: `F`, see `forward_stages`, and `tokens`, the number of tokens of a step."""
    stages = forward_stages(config.model, seq_len=config.data.seq_len, cp=config.mesh.cp)
    return {"F": stages, "tokens": _tokens(config)}


def _tokens(config: TrainerConfig) -> int:
    return config.data.global_batch_size * config.data.seq_len


def _tf32_forward(config: TrainerConfig) -> Bound:
    """Relative error that TF32 adds in forward.

    Both factors of a product are rounded to 10 + 1 bits, so that the product errs by at most 2 u + u^2 of the sum of
    its terms' sizes. Sums are in fp32, where tensor cores cut bits off: n terms err by n 2^-23 at most (Fasi et al.,
    https://doi.org/10.7717/peerj-cs.330). The longest sums are those over tokens in backward.

    A token passes in each block q/k/v, scores, values, output, gate and up, down; and the output layer.
    """
    return bound(
        "products * (2 * t + t**2 + tokens * cut)",
        products=6 * config.model.n_layers + 1,
        t=TF32_ROUNDOFF,
        tokens=_tokens(config),
        cut=2 * FP32_ROUNDOFF,
    )


def fp16_gradients(config: TrainerConfig, expected: Mapping[str, Tensor], *, loss_scale: float) -> dict[str, Bound]:
    """Return the relative deviation of each gradient computed in fp16 from `expected`, that of fp32 or better.

    The first term is that of `fp32_gradients`, with the unit roundoff of fp16. The second is underflow (Higham's book,
    see `emulated_gradients`, section 2.1: `fl(x) = x (1 + delta) + eta`, where delta or eta is zero): each of the
    stages that a token's gradient passes may err by half of FP16_SMALLEST in each element, independently; a weight adds
    up the errors of all tokens, times activations, which norms keep at about 1. In units of the unscaled gradient the
    error is divided by the loss scale. Where gradients are also added up and reduced in fp16, there is a sum over
    micro-batches and ranks, and one more stage: a gradient that is divided by about the root of the number of ranks
    before the reduction is divided by the rest of that number afterwards.
    """
    rounding, sums = "u * (3 * F + sqrt(tokens))", dict[str, float]()
    stages = _backward_stages(config.model)
    if dtype_policy(config.precision).reduce == FP16:
        rounding, sums = "u * (3 * F + sqrt(tokens) + sqrt(summands))", {"summands": _summands(config)}
        stages += 1
    error = Bound(rounding, {"u": FP16_ROUNDOFF, **_lengths(config), **sums})
    return {
        name: bound(
            "r + eta * stages * sqrt(tokens) * sqrt(numel) / (2 * max(scale * norm, eta))",
            r=error,
            eta=FP16_SMALLEST,
            stages=stages,
            tokens=_tokens(config),
            numel=grad.numel(),
            scale=loss_scale,
            norm=float(grad.double().norm()),
        )
        for name, grad in expected.items()
    }


def _summands(config: TrainerConfig) -> int:
    """Number of gradients, by micro-batch and data-parallel rank, that add up to that of a step."""
    return config.mesh.dp_replicate * _shards(config) * config.accumulation


def _backward_stages(model: ModelConfig) -> int:
    """Number of products and norms in backward, each of which is followed by a rounding.

    Forward has per block norm, q/k/v, scores, values, output; norm, gate and up, down; then norm, output. Backward
    repeats each twice.
    """
    return 2 * (8 * model.n_layers + 2)


def norm_condition(gradients: Mapping[str, Tensor], *, order: float) -> float:
    """Return the relative error of the total p-norm over that of the gradients in the 2-norm.

    ||g + d||_p differs from ||g||_p by at most ||d||_p, which is at most ||d||_2 for p >= 2, and n^(1/p - 1/2) ||d||_2
    below (Hoelder's inequality over n elements).
    """
    numel = sum(grad.numel() for grad in gradients.values())
    growth = float(numel ** max(0.0, 1 / order - 1 / 2))
    return growth * total_norm(gradients.values(), order=2.0) / total_norm(gradients.values(), order=order)


def gradient_norm(gradient_error: Bound, gradients: Mapping[str, Tensor], *, order: float) -> Bound:
    """Return the relative error of the total norm of gradients that have the given error."""
    return bound("e * c", e=gradient_error, c=norm_condition(gradients, order=order))


def clipped_gradients(gradient_error: Bound, gradients: Mapping[str, Tensor], *, order: float) -> Bound:
    """Return the relative error of clipped gradients: that of the gradients, and that of the norm in the factor."""
    return bound("e * (1 + c)", e=gradient_error, c=norm_condition(gradients, order=order))


def emulated_gradients(config: TrainerConfig, emulated: Emulation, *, loss_scale: float = 1.0) -> dict[str, Bound]:
    """Return the relative deviation of each gradient of a run from the emulation, which rounds where the run does.

    Only the order of sums may differ. Over two ranks a sum has one order, and of tensor-parallel sums in bf16 the order
    is known (`virtual_tp.sums_in_ring_order`): no bit may differ, as products of equal shapes are equal in every bit
    with one torch on one machine. A sum over n > 2 data-parallel ranks in any order has an error of at most (n - 1) u
    times the sum of its terms' sizes (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, section
    4.2), in the run as in the emulation; what is rounded after it, see `_roundings_of_sums`, adds one u each. Where
    such a sum is then cast to a coarser dtype, that of bf16 masters, see `_after_cast`. In fp16 the last division also
    errs by half of FP16_SMALLEST in each element of the gradient of the scaled loss. In fp32 with more than two
    tensor-parallel ranks, compiled by inductor, or with TF32, which the emulation does not model, run and emulation are
    independent computations, each with the error of `fp32_gradients`. What aot_eager compiles calls the kernels of
    eager mode. In 16 bits inductor rounds in other places: see `compiled_loss`.
    """
    if config.precision == "fp32" and (config.mesh.tp > 2 or config.compile == "inductor" or config.tf32):
        return dict.fromkeys(emulated.gradients, both(fp32_gradients(config)))
    reduced, added = _roundings_of_sums(config)
    if not reduced:
        return dict.fromkeys(emulated.conditions, EXACT)
    dtype = dtype_policy(config.precision).reduce
    roundoff = torch.finfo(getattr(torch, dtype)).eps / 2
    sums: dict[str, float | Bound] = {"n": reduced, "r": roundoff, "m": added, "u": FP32_ROUNDOFF}
    bounds = {name: Bound("2 * (n * r + m * u) * k", {**sums, "k": k}) for name, k in emulated.conditions.items()}
    bounds |= _after_cast(emulated, roundings=2 * reduced * roundoff)
    if dtype != FP16:
        return bounds
    return {
        name: bound(
            "s + (m + 1) * eta * sqrt(numel) / max(scale * norm, eta)",
            s=error,
            m=added,
            eta=FP16_SMALLEST,
            numel=emulated.gradients[name].numel(),
            scale=loss_scale,
            norm=float(emulated.gradients[name].double().norm()),
        )
        for name, error in bounds.items()
    }


def _after_cast(emulated: Emulation, *, roundings: float) -> dict[str, Bound]:
    """Return the relative deviation of gradients that are cast to a coarser dtype after sums in any order.

    Before the cast each element of the run is at most `roundings` times the sum of its terms' sizes away from that of
    the emulation. Casts and additions are monotone, so that the run's element lies between the results of the two ends:
    most often these are one number.
    """
    bounds = {}
    for name in emulated.uncast[0].sums if emulated.uncast else ():
        emulated_gradient = emulated.gradients[name]
        margins = [(each.sums[name].double(), roundings * each.sizes[name].double()) for each in emulated.uncast]
        ends = (
            reduce(add, [(sums + side * margin).to(emulated_gradient.dtype) for sums, margin in margins])
            for side in (-1.0, 1.0)
        )
        farthest = torch.maximum(*((end.double() - emulated_gradient.double()).abs() for end in ends))
        norm = float(emulated_gradient.double().norm())
        bounds[name] = bound("f", f=float(farthest.norm()) / norm if norm else 0.0)
    return bounds


def emulated_deviation(
    config: TrainerConfig, emulated: Emulation, exact: Mapping[str, Tensor], *, loss_scale: float
) -> dict[str, Bound]:
    """Return the relative deviation of each gradient of a run from `exact`, of a run that rounds as `emulated` does.

    The triangle inequality: own deviation of the emulation, which is measured, and that of the run from the emulation,
    see `emulated_gradients`, which is relative to an emulated gradient whose norm is at most 1 + d times that of the
    exact one.
    """
    deviations = {
        name: float((emulated.gradients[name].double() - gradient.double()).norm() / gradient.double().norm())
        for name, gradient in exact.items()
    }
    bounds = emulated_gradients(config, emulated, loss_scale=loss_scale)
    return {name: bound("d + e * (1 + d)", d=own, e=bounds[name]) for name, own in deviations.items()}


def compiled_loss(config: TrainerConfig) -> Bound:
    """Return the relative error of the mean loss of blocks that inductor compiles in the dtype of computation.

    The stages are those of `fp32_loss`. Kernels of inductor keep values in fp32 that those of eager mode round, so that
    no emulation has the same bits.
    """
    compute = getattr(torch, dtype_policy(config.precision).compute)
    return Bound("u * (F + sqrt(tokens))", {"u": torch.finfo(compute).eps / 2, **_lengths(config)})


def _roundings_of_sums(config: TrainerConfig) -> tuple[int, int]:
    """Return the numbers of roundings from the first sum without known order on: in the dtype of reductions, and after.

    Shards are summed, divided, then replicas; quotients by powers of two are exact. Reductions of micro-batches are
    added: shards that are reduced before the replicas (`all-reduce-last`) in the dtype of reductions, others in that of
    the masters. A sum of sums that have one order, such as that of micro-batches before their only reduction, is equal
    in run and emulation and does not count.
    """
    shards, replicas = _shards(config), config.mesh.dp_replicate
    if max(shards, replicas) <= 2:
        return 0, 0
    later = backward_count(config) - 1 if gradient_sync(config) != "last" else int(reduces_twice(config))
    postponed = gradient_sync(config) == "all-reduce-last"
    shard_sums = shards - 1 + later * postponed if shards > 2 else 0
    quotients = sum(not log2(ranks).is_integer() for ranks in (shards, replicas))
    return shard_sums + replicas - 1 + quotients, 0 if postponed else later


def both(error: Bound) -> Bound:
    """Return the deviation of two computations that both have the given error."""
    return bound("2 * g", g=error)


def _shards(config: TrainerConfig) -> int:
    return config.mesh.dp_shard if isinstance(config.mesh.dp_shard, int) else 1


def bf16_error_factor(config: TrainerConfig) -> Bound:
    """Return the ratio c of a bf16 run's error to that of its emulation, if both really compute in bf16: in [1/c, c].

    With the same roundings in another order of sums the two errors are realisations of one distribution. Errors of
    different tokens are independent, so their squared sums over n tokens have a relative variance of 2 / n each, and
    differ by at most 3 sigma = 3 sqrt(4 / n) of their size.
    """
    tokens = config.data.min_valid_fraction * config.data.global_batch_size * config.data.seq_len
    return bound("sqrt(1 + 3 * sqrt(4 / tokens))", tokens=tokens)


def norm(gradients: Mapping[str, Tensor], *, order: float, roundings: float = 1.0) -> Bound:
    """Return the relative error of the total norm of given gradients.

    A maximum is exact; other norms are a sum over all elements, in fp32. torch gives the norm of each gradient in the
    gradient's dtype, so that the norm of a bf16 gradient is rounded before norms are combined
    (https://docs.pytorch.org/docs/stable/generated/torch.linalg.vector_norm.html, `dtype`). `roundings` is the number
    of roundings in that dtype, see `norm_roundings`.
    """
    if order == inf:
        return EXACT
    coarsest = max(_roundoff(grad) for grad in gradients.values())
    terms: dict[str, float | Bound] = {"u": FP32_ROUNDOFF, "numel": sum(grad.numel() for grad in gradients.values())}
    if coarsest <= FP32_ROUNDOFF:
        return Bound("u * sqrt(numel)", terms)
    return Bound("coarsest * roundings + u * sqrt(numel)", {**terms, "coarsest": coarsest, "roundings": roundings})


def norm_roundings(config: TrainerConfig) -> float:
    """Return the number of roundings of the total norm in the dtype of sharded parameters, in units of its roundoff.

    Each parameter's norm is rounded. RMSNorms are in fp32, and norms are combined in the largest dtype of a mesh, so
    that there are more roundings only where RMSNorms are on another mesh than the other parameters, outside of tensor
    parallelism. Then the norms of a mesh are rounded when they are combined; and for each mesh dimension over which
    they are reduced, of n ranks, there are roundings of the p-th power, of n - 1 sums and of the p-th root
    (`_NormPartial` in torch/distributed/tensor/_ops/_math_ops.py), the first two of which count p times less after the
    root.
    """
    if config.norms_in_tp or config.mesh.tp == 1:
        return 1.0
    sizes = [ranks for ranks in (_shards(config), config.mesh.tp) if ranks > 1]
    return 2.0 + sum(ranks / config.optimizer.norm_order + 1.0 for ranks in sizes)


def clipping(gradients: Mapping[str, Tensor], *, order: float, roundings: float = 1.0) -> dict[str, Bound]:
    """Return the relative error of each clipped gradient, given the gradients before clipping.

    The norm, see there, norm + 1e-6, quotient and product are rounded, the last two in the gradient's dtype (a scalar
    tensor takes the dtype of the tensor that it is multiplied with).
    """
    error = norm(gradients, order=order, roundings=roundings)
    return {
        name: bound("n + u + 2 * v", n=error, u=FP32_ROUNDOFF, v=_roundoff(grad)) for name, grad in gradients.items()
    }


def _roundoff(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps / 2


def dropped_share(probability: float, *, samples: int) -> float:
    """Return how far the share of dropped elements may be from their probability, by Bernstein's inequality.

    Of n independent samples with variance v = p (1 - p) the mean is farther from p than sqrt(2 v L / n) + 2 L / (3 n)
    with a probability of at most 2 exp(-L); here it is 1e-9.
    """
    log_of_odds = log(2e9)
    return sqrt(2 * probability * (1 - probability) * log_of_odds / samples) + 2 * log_of_odds / (3 * samples)
