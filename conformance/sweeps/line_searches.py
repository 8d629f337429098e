"""Courses of LBFGS: many iterations in a step, and searches along lines that bracket a point and close in on it.

DTensors must take the course of plain tensors: as many iterations and evaluations, to the same parameters. A search
with the conditions of Wolfe never ends a step with a larger loss, and a quadratic loss ends in its minimum.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from conformance.instruments.sharding import full
from conformance.sweeps.layouts import difference, distributed
from conformance.sweeps.trials import Trials

STEPS = 2
"""Number of steps; the second begins with directions, and in holes few more keep close to a course."""
_BOUND = 2.0**-24
"""Bound on the deviation of parameters in fp64, relative to the largest one.

Ranks add up in another order, which rounds a dot product by at most 2**-50 of its terms. Some 60 directions are made of
differences of gradients that are at least 2**-10 of these, and each iteration hands its error on to the next ones.
"""
_NEAR = 2.0**-20
"""Distance from the minimum of a quadratic loss, in which LBFGS, that knows its curvatures then, ends."""
_START = (-7.0, -3.0, 3.0, 6.0, -5.0, 1.0)
"""Numbers with which every course begins, times its scale: on some ranks of four there are none."""
Slopes = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Function of distances from the minimum; returns the losses of the elements and their gradients."""


def _quadratic(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * x / 2, x


def _hole(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss that is flat far from its minimum: steps there are too long, and later ones too short."""
    depth = torch.exp(-x * x)
    return 1 - depth, 2 * x * depth


@dataclass(frozen=True)
class Course:
    """Loss, with options of LBFGS."""

    name: str
    slopes: Slopes
    minimum: float
    curvatures: tuple[float, ...]
    """Factors of the losses of the elements."""
    scale: float
    options: Mapping[str, Any]

    @property
    def ends_by_rounding(self) -> bool:
        """True if nothing but roundings tells when a step ends, so that only the end can be compared."""
        return self.options.get("tolerance_change") == 0.0

    @property
    def start(self) -> Tensor:
        """Full parameter at the beginning."""
        return torch.tensor(_START, dtype=torch.float64) * self.scale


_ONES, _GROWING = (1.0,) * len(_START), (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
_SEARCH = {"line_search_fn": "strong_wolfe", "max_iter": 20}
_TO_THE_END = {"tolerance_grad": 0.0, "tolerance_change": 0.0}
COURSES = (
    Course("many iterations", _quadratic, 1.0, _GROWING, 0.5, {"lr": 1.0, "max_iter": 20, **_TO_THE_END}),
    Course("a step too long", _quadratic, 1.0, _GROWING, 0.125, {"lr": 64.0, **_SEARCH, **_TO_THE_END}),
    Course("a hole", _hole, 0.0, _ONES, 0.625, {"lr": 4.0, **_SEARCH}),
    Course("an uneven hole", _hole, 0.0, _GROWING, 0.75, {"lr": 4.0, **_SEARCH}),
    Course("no iteration", _quadratic, 1.0, _GROWING, 0.125, {"lr": 1.0, "max_iter": 0}),
)


@dataclass(frozen=True)
class End:
    """End of a course: the full parameter, the losses before and after each step, and counts of the optimizer."""

    parameter: Tensor
    losses: list[float]
    counts: dict[str, int]


def try_courses(trials: Trials) -> None:
    """Take every course on rows, or on rows and replicas."""
    for course in COURSES:
        trials.attempt("LBFGS", "courses", course.name, partial(_faults, course), may_refuse=False)


def _faults(course: Course, mesh: DeviceMesh) -> dict[str, str]:
    """Return the faults of a course on a mesh."""
    layout = (Shard(0), *[Replicate()] * (mesh.ndim - 1))
    expected = end_of(course, lambda x: x)
    measured = end_of(course, lambda x: distributed(x, mesh, layout))
    faults = wrong_end(course, expected)
    if measured.counts != expected.counts and not course.ends_by_rounding:
        faults["course"] = f"{course.name}: {measured.counts}, expected {expected.counts}"
    elif text := difference(measured.parameter, expected.parameter, bound=_BOUND):
        faults["course"] = f"{course.name}: {text}"
    return faults


def end_of(course: Course, place: Callable[[Tensor], Tensor]) -> End:
    """Take the steps of a course on tensors that are laid out by `place`."""
    start = course.start
    parameter = place(start).requires_grad_()
    curvatures = place(torch.tensor(course.curvatures, dtype=start.dtype))
    optimizer: Any = torch.optim.LBFGS([parameter], **course.options)

    def loss() -> float:
        value, slope = course.slopes(parameter.detach() - course.minimum)
        parameter.grad = slope * curvatures
        return float(full((value * curvatures).sum()))

    losses = [float(optimizer.step(loss)) for _ in range(STEPS)]
    counts = {name: optimizer.state[parameter][name] for name in ("n_iter", "func_evals")}
    return End(full(parameter.detach()), [*losses, loss()], counts)


def wrong_end(course: Course, end: End) -> dict[str, str]:
    """Return the faults of a course on plain tensors."""
    losses = end.losses
    if not course.options["max_iter"]:
        return {} if torch.equal(course.start, end.parameter) else {"step": f"{course.name}: the parameter has changed"}
    if course.slopes is _quadratic and float((end.parameter - course.minimum).abs().max()) > _NEAR:
        return {"minimum": f"{course.name}: losses {losses}"}
    if "line_search_fn" in course.options and any(after > before for before, after in itertools.pairwise(losses)):
        return {"loss": f"{course.name}: {losses}"}
    return {}
