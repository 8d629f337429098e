"""First wrong state of a run: initial values, reduced gradients, clipping and the optimizer, each from its own inputs.

What a rank should hold is computed from what the run itself held before, so that a fault of an earlier place does not
count again.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from conformance.bound import EXACT, Bound
from conformance.localisation.equality import deviation, elements_clause, equals_clause, multiple, weights_of_terms
from conformance.localisation.ranks import Ranks
from conformance.run.shards import CapturedShards

Shards = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class WrongShard:
    """Shard of a rank that differs from the expected one."""

    name: str
    rank: int
    measured: Tensor | None
    """Shard of the rank; None if the rank lacks it."""
    expected: Tensor | None
    """Expected shard; None if there should be none."""
    deviation: float


@dataclass(frozen=True, eq=False)
class WrongState:
    """Wrong shards of one kind of tensor, at least one, of which the first is told."""

    shards: Sequence[WrongShard]
    compared: int
    """Number of tensors of the kind."""

    @property
    def first(self) -> WrongShard:
        """Shard that is told."""
        return self.shards[0]

    @property
    def ranks(self) -> list[int]:
        """Ranks whose shard of the first wrong tensor is wrong."""
        return sorted({shard.rank for shard in self.shards if shard.name == self.first.name})

    @cached_property
    def names(self) -> list[str]:
        """Names of the wrong tensors."""
        return list(dict.fromkeys(shard.name for shard in self.shards))

    @property
    def share_clause(self) -> str:
        """Clause about further tensors that are wrong; empty if there are none."""
        others = len(self.names) - 1
        return f"{len(self.names)} of {self.compared} tensors are wrong" if others else ""


def wrong_shards(
    ranks: Ranks,
    measured: Callable[[int], Shards],
    expected: Callable[[int], Shards],
    *,
    within: Mapping[str, Bound] | None = None,
    order: Sequence[str] = (),
    may_be_more: bool = True,
) -> WrongState | None:
    """Compare the tensors of each rank with the expected ones; `order` are names in the order in which they are told.

    Without a bound no bit may differ. Ranks may have tensors that are not expected only if there `may_be_more`.
    """
    bounds = within or {}
    wrong, names = [], set()
    for rank in ranks.all:
        own, due = measured(rank), expected(rank)
        for name, tensor in due.items():
            names.add(name)
            shard = own.get(name)
            distance = math.inf if shard is None else deviation(shard, tensor)
            if distance > bounds.get(name, EXACT).value or (shard is not None and shard.dtype != tensor.dtype):
                wrong.append(WrongShard(name, rank, shard, tensor, distance))
        if not may_be_more:
            wrong += [WrongShard(name, rank, shard, None, math.inf) for name, shard in own.items() if name not in due]
    names |= {shard.name for shard in wrong}
    places = {name: index for index, name in enumerate(order)}
    wrong.sort(key=lambda shard: (places.get(shard.name, len(places)), shard.rank))
    return WrongState(wrong, len(names)) if wrong else None


def shards_of(record: CapturedShards, full: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return the shards that a rank should hold of full tensors, by name; those that it has no part of are left out."""
    held = record.shards[rank]
    shards = {}
    for name, tensor in full.items():
        if name not in record.ranks[rank].parameters:
            continue
        indices = held.get(f"layout/{name}")
        shards[name] = tensor if indices is None else tensor.flatten()[indices.flatten()].view(indices.shape)
    return shards


def equals(wrong: WrongShard, *, sizes: Mapping[str, float], others: Mapping[str, Tensor]) -> str:
    """Return a clause about the value of a wrong shard."""
    if wrong.measured is None:
        return "is missing"
    if wrong.expected is None:
        return "is superfluous: one process has none"
    if wrong.measured.dtype != wrong.expected.dtype:
        return f"is {_name(wrong.measured.dtype)}, expected {_name(wrong.expected.dtype)}"
    clause = equals_clause(wrong.measured, wrong.expected, sizes=sizes, others=others)
    if not wrong.measured.is_floating_point():
        return clause or "differs"
    return clause or f"is off by {wrong.deviation:.2g} of its size"


def elements(record: CapturedShards, wrong: WrongState) -> str:
    """Return a clause about the wrong elements of the full tensor, on all ranks."""
    first = wrong.first
    full = record.parameters.get(first.name)
    layouts = [record.shards[shard.rank].get(f"layout/{first.name}") for shard in wrong.shards]
    if first.measured is None or first.expected is None or first.measured.shape != first.expected.shape:
        return ""
    if full is None or any(layout is None for layout in layouts):
        return elements_clause(first.measured, first.expected, within=0.0)
    mask = torch.zeros(math.prod(full.shape), dtype=torch.float64)
    for shard, layout in zip(wrong.shards, layouts, strict=True):
        if shard.name != first.name or shard.measured is None or shard.expected is None or layout is None:
            continue
        if shard.measured.shape == shard.expected.shape:
            differs = shard.measured.double() != shard.expected.double()
            mask[layout.flatten()] = differs.flatten().double()
    mask = mask.view(tuple(full.shape))
    return elements_clause(mask, torch.zeros_like(mask), within=0.0)


def terms_clause(measured: Tensor, terms: Mapping[str, Tensor], *, weight: float) -> str:
    """Return a clause about a wrong sum of terms by name, each of which should have a weight; empty if it is no sum."""
    weights = weights_of_terms(measured, list(terms.values()))
    if weights is None:
        return ""
    relative = {name: round(value / weight, 3) + 0.0 for name, value in zip(terms, weights, strict=True)}
    present = [name for name, value in relative.items() if value]
    if len({*relative.values()}) == 1:
        return ""  # a multiple, which `equals` names
    if {*relative.values()} == {0.0, 1.0}:
        return f"lacks the gradient of {'; '.join(name for name in relative if name not in present)}"
    told = [f"{relative[name]:g} x that of {name}" for name in present]
    return f"is the sum of {', '.join(told)}, where each gradient should count once"


def number_clause(measured: float, expected: float, candidates: Iterator[tuple[str, float]]) -> str:
    """Return a clause about a wrong number: another number that it equals, or the factor by which it is off."""
    for name, value in candidates:
        if math.isclose(measured, value, rel_tol=1e-5):
            return f"is {measured:.6g}, {name}; expected {expected:.6g}"
    told = measured and math.isfinite(measured)
    ratio = multiple(torch.tensor([measured]), torch.tensor([expected])) if told else None
    factor = f", {ratio:.6g} x expected" if ratio is not None else ""
    return f"is {measured:.6g}, expected {expected:.6g}{factor}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
