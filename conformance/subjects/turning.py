"""Elements that turn in bf16: where the error of a gradient's element exceeds the element, its step turns round.

Steps like Adam's are as long for a small gradient as for a large one, so that an element that turns is off by two
steps. In a large tensor a share of the elements turns, of which own errors of runs in one process tell. A small tensor
has no share of an element: one of 16 that turns is off by 2 / sqrt(16) of the whole change, whatever the share is.

The share p is that of all elements of the runs in bf16 in one process. The gradients of a correct parallel run may be
twice as far from fp64 (see `evidence.BF16_FACTOR`) and so turn twice as many, as those with |gradient| below a small
error are as many as the error is large. Of n elements a number turns that is about Poisson's with mean 2 p n, each by
itself. The number that is exceeded with a probability of 1e-4 is allowed, of the elements with the shortest steps: a
step that is linear in gradients is hardly off where these turn, so that the rule changes nothing for it.
"""

from collections.abc import Sequence

import torch

from conformance.oracles.reference import clip_factor
from conformance.subjects.evidence import BF16_FACTOR
from conformance.subjects.facts import OwnErrors
from conformance.subjects.noise import first_step
from conformance.subjects.protocol import Subject
from conformance.subjects.reference import Tensors, Trajectory, is_noise

_MORE_ELEMENTS = 2.0
_EXCEEDED_WITH = 1e-4


def allowing_turns(
    errors: OwnErrors, turned: Tensors, runs: Sequence[Tensors], exact: Tensors, origin: Tensors, in_fp32: OwnErrors
) -> OwnErrors:
    """Return own errors of changes since the start, of which a bound allows as many elements to turn as may.

    `runs` and `exact` are parameters after a step, in bf16 and in the more accurate process. `turned` is the distance
    by which each element is off that turns once, see `distances_if_turned`; `in_fp32` tells the parameters whose
    changes are noise, all of whose elements turn by chance.
    """
    known = {name: each for name, each in turned.items() if not is_noise(name, in_fp32)}
    share = max(_share(run, exact, known) for run in runs)
    by_name = dict(errors.by_name)
    for name, distances in known.items():
        shortest = distances[distances > 0].double().sort().values
        allowed = allowed_turns(_MORE_ELEMENTS * share * len(shortest))
        change = float((exact[name] - origin[name]).double().norm())
        if change:
            by_name[name] = max(by_name[name], float(shortest[:allowed].norm()) / change / BF16_FACTOR)
    return OwnErrors(by_name, errors.overall)


def distances_if_turned(subject: Subject, exact: Trajectory, max_norm: float) -> Tensors:
    """Return by how much each element's first step differs between its clipped gradient and the opposite one."""
    factor = clip_factor(exact.norms[0], max_norm=max_norm)
    steps, turned = (
        first_step(subject, exact, {name: sign * each.float() for name, each in exact.gradients[0].items()})
        for sign in (factor, -factor)
    )
    return {name: (step - turned[name]).abs() for name, step in steps.items()}


def allowed_turns(mean: float) -> int:
    """Return the smallest number that a Poisson variable with a mean exceeds with a probability of at most 1e-4.

    It exceeds k with the probability of the regularised lower incomplete gamma function of k + 1 and the mean, which is
    near one half about the mean: https://en.wikipedia.org/wiki/Poisson_distribution
    """
    first, deviation = int(mean), mean**0.5
    numbers = first + torch.arange(int(10 * deviation) + 10, dtype=torch.float64)
    exceeds = torch.special.gammainc(numbers + 1, torch.full_like(numbers, mean))
    return first + int((exceeds > _EXCEEDED_WITH).sum())


def _share(run: Tensors, exact: Tensors, turned: Tensors) -> float:
    """Return the share of elements that turned in a run: those that are nearer to two steps off than to none."""
    count = sum(int(((run[name] - exact[name]).abs() > each / 2)[each > 0].sum()) for name, each in turned.items())
    return count / max(sum(int((each > 0).sum()) for each in turned.values()), 1)
