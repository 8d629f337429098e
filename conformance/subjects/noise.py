"""Steps that jump, as Lion's by a sign, and models that round: errors of runs that are as wrong as laws allow.

A step that is a smooth function of gradients makes parameters as inaccurate as gradients are, and few orders of sums
tell how much. One that jumps does not: an element of a gradient whose own error is larger than itself falls on either
side, by chance in one run and not in the next, and changes a parameter by two steps.

A correct run's gradients are within their bounds, `evidence.FP32_FACTOR` times the own errors e. So runs in one process
get gradients with normal noise of that size n = 8 e; what these leave is what laws allow, without a further factor. An
element that jumps in a correct run is nearer to zero than about e, as it is the sum of one process but for rounding. It
does not jump in a run with noise, nor in the one with the opposite sign, if the noise is smaller than it: for normal
numbers with P(|n| < e) = 0.1, and for two such pairs 0.01.

A model that rounds, as one with quantised activations, jumps where a number is half-way between two others. Tensor
parallelism adds up products in parts, which no order of samples shows: weights that are off by the same multiple of
rounding do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conformance.instruments.dispatch_tap import DispatchTap, OutcomeHandler
from conformance.oracles.tolerance import FP32_ROUNDOFF
from conformance.subjects import reference
from conformance.subjects.cells import Workload
from conformance.subjects.data import all_micro_batches
from conformance.subjects.evidence import FP32_FACTOR
from conformance.subjects.facts import OwnErrors
from conformance.subjects.protocol import Subject
from conformance.subjects.turns import turns_of

_PAIRS = 2
_ROUNDING = ("round", "floor", "ceil", "trunc", "sign")
_CASTS = ("_to_copy", "copy_")
"""Operators of torch that round floating-point numbers, and those that may, by their schemas."""
_TINY = 1e-6
"""Factor by which noise is made smaller than an optimizer's epsilon: Adam's steps, which are steep, are small then."""
_JUMPS_ABOVE = 1e-2
"""Length of a step by tiny noise, relative to that by gradients, from which on steps jump: that of a sign is 1."""


@dataclass(frozen=True)
class GradientNoise:
    """Normal noise on the gradients with which an optimizer steps, as large as their bounds."""

    errors: Sequence[OwnErrors]
    """Own errors of gradients by step."""
    seed: int
    sign: float = 1.0
    is_on_weights: bool = False
    """True if the initial weights are off, too."""

    def in_step(self, step: int, gradients: reference.Tensors) -> reference.Tensors:
        """Return the noise on the gradients of a step, by name, of the same shapes and dtypes.

        There is none where gradients are exactly 0, as those of tokens that a batch does not have: no rounding does.
        """
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        errors, noise = self.errors[step], {}
        for name, gradient in gradients.items():
            relative = FP32_FACTOR * max(errors.by_name.get(name, 0.0), errors.overall, FP32_ROUNDOFF)
            size = self.sign * relative * float(gradient.norm()) / max(gradient.numel(), 1) ** 0.5
            normal = torch.randn(gradient.shape, generator=generator).to(gradient)
            noise[name] = (size * normal).where(gradient != 0, 0.0)
        return noise

    @torch.no_grad()
    def on_weights(self, model: nn.Module) -> None:
        """Change the initial weights of a model by rounding, times the factor of bounds."""
        generator = torch.Generator().manual_seed(self.seed)
        for parameter in model.parameters() if self.is_on_weights else ():
            normal = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.mul_(1.0 + self.sign * FP32_FACTOR * FP32_ROUNDOFF * normal)


def runs_with_noise(
    subject: Subject,
    workload: Workload,
    exact: reference.Trajectory,
    errors: Sequence[OwnErrors],
    *,
    max_norm: float,
    splits_sums: bool,
) -> list[reference.Trajectory]:
    """Return fp32 runs with gradients that are as wrong as laws allow; none where neither steps nor the model jump.

    `errors` are the own errors of gradients by step, `exact` is the run of the more accurate process. `splits_sums` is
    True for a trainer with tensor parallelism.
    """
    is_rounding = splits_sums and _rounds(subject, workload)
    if not is_rounding and not _jumps(subject, exact, GradientNoise(errors, seed=0)):
        return []
    noises = [GradientNoise(errors, seed, sign, is_rounding) for seed in range(_PAIRS) for sign in (1.0, -1.0)]
    return [
        reference.train(subject, workload, dtype=torch.float32, order=0, max_norm=max_norm, noise=noise)
        for noise in noises
    ]


def _rounds(subject: Subject, workload: Workload) -> bool:
    """Return whether the model of one process rounds numbers, or casts them to fewer bits, in forward."""
    model, found = reference.initial_model(subject, tied=workload.tied), list[str]()

    def listen(func: Any) -> OutcomeHandler | None:
        name = str(func.overloadpacket).removeprefix("aten.")

        def note(args: Sequence[Any], _kwargs: Mapping[str, Any], result: Any) -> None:
            if name in _ROUNDING or _loses_bits(args[-1] if name == "copy_" else args[0], result):
                found.append(name)

        return note if name in (*_ROUNDING, *_CASTS) else None

    batch = all_micro_batches(subject, workload, step=0)[0]
    with torch.no_grad(), DispatchTap([], outcomes=[listen]):
        for turn in turns_of(subject):
            turn.subject.loss(model, batch)
    return bool(found)


def _loses_bits(source: Any, result: Tensor) -> bool:
    if not isinstance(source, Tensor) or not source.is_floating_point() or result.dtype == torch.bool:
        return False
    return not result.is_floating_point() or result.dtype.itemsize < source.dtype.itemsize


def _jumps(subject: Subject, exact: reference.Trajectory, noise: GradientNoise) -> bool:
    """Return whether the first step is about as long by tiny noise alone as by gradients, for some parameter."""
    gradients = {name: gradient.float() for name, gradient in exact.gradients[0].items()}
    tiny = {name: _TINY * each for name, each in noise.in_step(0, gradients).items()}
    usual, only = (first_step(subject, exact, by) for by in (gradients, tiny))
    return any(float(only[name].norm()) > _JUMPS_ABOVE * float(usual[name].norm()) for name in usual)


def first_step(subject: Subject, exact: reference.Trajectory, gradients: reference.Tensors) -> reference.Tensors:
    """Return the change of each parameter by the first step of the first optimizer."""
    parameters = {name: nn.Parameter(exact.initial[name].float().clone()) for name in gradients}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = turns_of(subject)[0].subject.make_optimizer(parameters.values())
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].clone()
    optimizer.step()
    return {name: parameter.detach() - before[name] for name, parameter in parameters.items()}


def raised(errors: Sequence[OwnErrors], noisy: Sequence[OwnErrors]) -> list[OwnErrors]:
    """Return own errors by step that are no smaller than those with noise, which a bound's factor does not multiply."""
    return [
        OwnErrors(
            {name: max(own, with_noise.by_name[name] / FP32_FACTOR) for name, own in each.by_name.items()},
            max(each.overall, with_noise.overall / FP32_FACTOR),
        )
        for each, with_noise in zip(errors, noisy, strict=True)
    ]
