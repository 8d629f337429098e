"""Collectives of a step whose result differs from that of their inputs on all ranks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from conformance.instruments.facts import Collective
from conformance.instruments.taps import Tap
from conformance.localisation.equality import deviation, elements_clause
from conformance.localisation.ranks import Ranks
from conformance.localisation.traces import Trace

_SUMS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, eq=False)
class WrongCollective:
    """Collective whose result is wrong on a rank."""

    rank: int
    index: int
    """Index of the result's tap in the rank's trace."""
    collective: Collective
    measured: Tensor
    expected: Tensor
    deviation: float

    @property
    def clause(self) -> str:
        """Clause about the result."""
        implied = "the sum of its inputs" if self.collective.kind in _SUMS else "its inputs put together"
        where = elements_clause(self.measured, self.expected, within=0.0)
        return f"is off by {self.deviation:.2g} from {implied}{f', {where}' if where else ''}"


def wrong_collectives(
    step: int, ranks: Ranks, traces: Sequence[Trace], logs: Sequence[Sequence[Collective]]
) -> Iterator[WrongCollective]:
    """Yield the wrong results of a step's collectives, by rank in the order of execution.

    Results of ranks whose partners' inputs are not known are left out.
    """
    for rank in ranks.all:
        for index, (tap, tensor) in enumerate(zip(traces[rank].taps, traces[rank].tensors, strict=True)):
            if tap.step == step and tap.kind == "collective output":
                yield from _judged(rank, index, tap, tensor, ranks, traces, logs)


def _judged(
    rank: int,
    index: int,
    tap: Tap,
    tensor: Tensor,
    ranks: Ranks,
    traces: Sequence[Trace],
    logs: Sequence[Sequence[Collective]],
) -> Iterator[WrongCollective]:
    collective = logs[rank][tap.call]
    group = ranks.group(rank, collective.group)
    place = _place_in_group(logs[rank], tap.call)
    inputs = [tensor for each in group for tensor in _inputs(collective, place, traces[each], logs[each])]
    if len(inputs) < 2 or len(inputs) != len(group):
        return
    expected = _implied(collective, inputs, group.index(rank))
    if expected is None or expected.shape != tensor.shape:
        return
    distance = deviation(tensor, expected)
    if distance > _rounding(collective, inputs):
        yield WrongCollective(rank, index, collective, tensor, expected, distance)


def _place_in_group(log: Sequence[Collective], number: int) -> int:
    """Return how many collectives of the same group a rank has issued before one of them."""
    return sum(each.group == log[number].group for each in log[:number])


def _inputs(collective: Collective, place: int, trace: Trace, log: Sequence[Collective]) -> Iterator[Tensor]:
    """Yield the input of a rank to the collective that is the n-th of its group, if that rank has issued the same."""
    in_group = [number for number, each in enumerate(log) if each.group == collective.group]
    if place >= len(in_group) or log[in_group[place]].kind != collective.kind:
        return
    for tap, tensor in zip(trace.taps, trace.tensors, strict=True):
        if tap.kind == "collective input" and tap.call == in_group[place]:
            yield tensor


def _implied(collective: Collective, inputs: Sequence[Tensor], place: int) -> Tensor | None:
    """Return the result that inputs of equal shapes imply; None for kinds and operations that are not judged."""
    if len({tensor.shape for tensor in inputs}) > 1:
        return None
    if collective.kind == "all_gather":
        return torch.cat(tuple(inputs))
    if collective.kind not in _SUMS or collective.reduce_op != "SUM":
        return None
    total = reduce(add, inputs)
    return total if collective.kind == "all_reduce" else total.chunk(len(inputs))[place]


def _rounding(collective: Collective, inputs: Sequence[Tensor]) -> float:
    """Return the relative deviation of a result that rounding can explain.

    Two numbers have one sum. More are added in any order: each of two orders errs by (n - 1) u times the sum of the
    sizes of the terms, see `oracles.tolerance.emulated_gradients`.
    """
    if collective.kind not in _SUMS or len(inputs) == 2 or not inputs[0].is_floating_point():
        return 0.0
    sizes, total = (float(reduce(add, terms).double().norm()) for terms in ([t.abs() for t in inputs], inputs))
    roundoff = torch.finfo(inputs[0].dtype).eps / 2
    return 2 * (len(inputs) - 1) * roundoff * sizes / total if total else math.inf
