"""Walk through a step in the order of execution, to the first tapped tensor that differs from the expected one."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from conformance.instruments.taps import Tap
from conformance.localisation.equality import deviation
from conformance.localisation.expected import ExpectedTraces
from conformance.localisation.layouts import Held, expected_shard, is_partial
from conformance.localisation.ranks import Ranks
from conformance.localisation.traces import Trace
from conformance.report.location import Mark


@dataclass(frozen=True, eq=False)
class Compared:
    """Tapped tensor of a rank with the expected one."""

    rank: int
    index: int
    """Index in the rank's trace."""
    position: float
    """Position of the place in the trace of the oracle."""
    tap: Tap
    measured: Tensor
    expected: Tensor | None
    """Part that the rank should hold; None if no layout fits."""
    deviation: float
    is_wrong: bool
    is_of_other_dtype: bool


@dataclass(frozen=True, eq=False)
class ComparedStep:
    """All tapped tensors of one step of a run with the expected ones."""

    step: int
    ranks: Ranks
    traces: Sequence[Trace]
    expected: ExpectedTraces

    @cached_property
    def compared(self) -> list[Compared]:
        """Tapped tensors whose places the oracle has, by rank, in the order of execution."""
        return [each for rank in self.ranks.all for each in self._compared_on(rank)]

    @property
    def wrong(self) -> list[Compared]:
        """Tapped tensors that differ from the expected ones, the first in the order of the oracle at the front."""
        wrong = [each for each in self.compared if each.is_wrong or each.is_of_other_dtype]
        if not self.expected.is_layout_known:
            wrong = [each for each in wrong if not self._is_right_again(each)]
        return sorted(wrong, key=lambda each: (each.position, each.index, each.rank))

    def _is_right_again(self, wrong: Compared) -> bool:
        """Return whether the module of a wrong tensor, or one around it, has a right result all the same."""
        tap = wrong.tap
        if wrong.is_of_other_dtype and not wrong.is_wrong:
            return False
        if tap.kind == "parameter gradient":
            return f"{tap.module}.{tap.item}" in self.expected.reduced
        end = "input gradient" if "gradient" in tap.kind or tap.kind == "parameter in backward" else "output"
        around = [tap.module] if tap.kind != end else []
        for path in (*around, *_parents(tap.module)):
            after = self._ends.get((wrong.rank, path, end), [])
            first = next((each for each in after if each.index > wrong.index), None)
            if first is not None and not first.is_wrong:
                return True
        return False

    @cached_property
    def _ends(self) -> dict[tuple[int, str, str], list[Compared]]:
        """Compared tensors by rank, module and kind, in the order of execution."""
        found: dict[tuple[int, str, str], list[Compared]] = {}
        for each in self.compared:
            found.setdefault((each.rank, each.tap.module, each.tap.kind), []).append(each)
        return found

    def marks(self) -> dict[str, Mark]:
        """Return the state of each module: `follows` if any of its tensors is wrong, `unseen` if none was compared."""
        marks: dict[str, Mark] = dict.fromkeys(dict.fromkeys(name for t in self.traces for name in t.modules), "unseen")
        for each in self.compared:
            if each.is_wrong or each.is_of_other_dtype:
                marks[each.tap.module] = "follows"
            elif marks.get(each.tap.module) == "unseen":
                marks[each.tap.module] = "right"
        return marks

    def group(self, rank: int, tap: Tap) -> list[Held]:
        """Return the tensors at a place of all ranks of a rank's tensor-parallel group that have one."""
        held = []
        for peer in self.ranks.peers(rank):
            trace = self.traces[peer]
            index = trace.index.get(tap.place)
            if index is not None:
                held.append(Held(trace.taps[index], trace.tensors[index]))
        return held

    def oracle(self, rank: int) -> Trace:
        """Return the trace of the oracle for the data of a rank."""
        return self.expected.traces[self.ranks.data_ranks[rank]]

    def _compared_on(self, rank: int) -> Iterator[Compared]:
        oracle, trace = self.oracle(rank), self.traces[rank]
        position = 0.0
        for index, (tap, tensor) in enumerate(zip(trace.taps, trace.tensors, strict=True)):
            if tap.step != self.step:
                continue
            place = (*tap.place[:-1], False)
            known = oracle.index.get(place)
            if known is None:
                continue
            # A forward that backward repeats comes behind the last place of backward that is not repeated.
            position = position if tap.is_recomputed else float(known)
            yield self._compare(rank, index, position, tap, tensor, oracle.taps[known], oracle.tensors[known])

    def _compare(
        self, rank: int, index: int, position: float, tap: Tap, tensor: Tensor, expected_tap: Tap, full: Tensor
    ) -> Compared:
        peers, group = self.ranks.peers(rank), self.group(rank, tap)
        measured = tensor
        if is_partial(tap) and len(group) == len(peers):
            measured = _sum(group)
        member = peers.index(rank) if len(group) == len(peers) else 0
        own = expected_shard(
            full, [Held(tap, measured)] if is_partial(tap) else group, 0 if is_partial(tap) else member
        )
        unknown = math.inf if self.expected.is_layout_known else math.nan
        distance = unknown if own is None else deviation(measured, own)
        data_rank = self.ranks.data_ranks[rank]
        dtypes = self.expected.dtypes_at(data_rank, tap, expected_tap.dtype)
        is_other = tensor.is_floating_point() and bool(dtypes) and tap.dtype not in dtypes
        return Compared(
            rank=rank,
            index=index,
            position=position,
            tap=tap,
            measured=measured,
            expected=own,
            deviation=distance,
            is_wrong=distance > self.expected.within_at(data_rank, tap),
            is_of_other_dtype=is_other,
        )


def _sum(group: Sequence[Held]) -> Tensor:
    total = group[0].tensor
    for held in group[1:]:
        total = total + held.tensor
    return total


def container(paths: Sequence[str]) -> str:
    """Return the path of the deepest module that contains all modules of the paths, or is one of them.

    >>> container(["layers.1.attention.wq", "layers.1.attention.wk"])
    'layers.1.attention'
    """
    common: list[str] = []
    for words in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(words)) > 1:
            break
        common.append(words[0])
    return ".".join(common)


def _parents(path: str) -> Iterator[str]:
    """Yield the paths of the modules around a module but the model, the innermost first."""
    while path := parent(path):
        yield path


def parent(path: str) -> str:
    """Return the path of the module that contains a module; empty for the model."""
    return path.rpartition(".")[0]


def by_rank(found: Sequence[Compared]) -> Mapping[int, Compared]:
    """Return the first of the tensors of each rank."""
    first: dict[int, Compared] = {}
    for each in found:
        first.setdefault(each.rank, each)
    return first
