"""Traces: the taps of one process in the order of execution, with their tensors, by place."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
from safetensors.torch import load_file
from torch import Tensor

from conformance.instruments.taps import Line, Number, OtherCall, Tap, TapFile, Taps
from conformance.report.location import Code

Place = tuple[int, str, str, str, int, bool]
"""Place of a tensor, see `Tap.place`."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Taps of one process, in the order of execution, with the tensor of each."""

    taps: Sequence[Tap]
    tensors: Sequence[Tensor]
    lines: Sequence[Line] = ()
    issued: Sequence[int] = ()
    issuers: Sequence[str] = ()
    scalars: Mapping[str, Sequence[int]] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, Sequence[Number]] = field(default_factory=dict)
    own_lines: Mapping[str, Sequence[int]] = field(default_factory=dict)
    other_calls: Sequence[OtherCall] = ()

    @cached_property
    def index(self) -> dict[Place, int]:
        """Index of the last tap at each place."""
        return {tap.place: index for index, tap in enumerate(self.taps)}

    @cached_property
    def consumers(self) -> dict[int, list[Tap]]:
        """Inputs of modules by the number of the tensor that is passed."""
        found: dict[int, list[Tap]] = {}
        for tap in self.taps:
            if tap.kind == "input":
                found.setdefault(tap.value, []).append(tap)
        return found

    def tensor(self, place: Place) -> Tensor | None:
        """Return the tensor at a place; None if there is none."""
        index = self.index.get(place)
        return None if index is None else self.tensors[index]

    def code(self, line: int) -> Code | None:
        """Return a line of source by its index; None outside of `lines`."""
        if not 0 <= line < len(self.lines):
            return None
        found = self.lines[line]
        return Code(file=found.file, line=found.number, function=found.function)


def read_trace(directory: Path, *, rank: int) -> Trace:
    """Return the trace that a rank has written, see `Taps.write`."""
    content = msgspec.msgpack.decode((directory / f"taps{rank}.msgpack").read_bytes(), type=TapFile)
    tensors = load_file(directory / f"taps{rank}.safetensors")
    return Trace(
        content.taps,
        [tensors[str(index)] for index in range(len(content.taps))],
        content.lines,
        content.issued,
        content.issuers,
        content.scalars,
        content.modules,
        content.numbers,
        content.own_lines,
        content.other_calls,
    )


class MicroBatch(NamedTuple):
    """Taps of one micro-batch of a process, its number, and its place in the order of backward."""

    taps: Taps
    number: int
    place: int


def joined(micro_batches: Sequence[MicroBatch]) -> Trace:
    """Return the trace of several micro-batches of one process, with the calls counted as of one run.

    A module that a micro-batch leaves out is not called in it, and its parameters have no gradients.
    """
    forwards = _calls_before(sorted(micro_batches, key=lambda each: each.number), _calls_of_modules)
    backwards = _calls_before(sorted(micro_batches, key=lambda each: each.place), _parameters_with_gradients)
    taps: list[Tap] = []
    for each in micro_batches:
        for tap in each.taps.taps:
            if tap.kind == "parameter gradient":
                call = backwards[each.number][f"{tap.module}.{tap.item}"]
            else:
                call = forwards[each.number][tap.module] + tap.call
            taps.append(msgspec.structs.replace(tap, call=call, value=tap.value + each.place * _NUMBERS_APART))
    tensors = [tensor for each in micro_batches for tensor in each.taps.tensors]
    return Trace(taps, tensors, modules=micro_batches[0].taps.modules)


def _calls_before(
    ordered: Sequence[MicroBatch], calls_of: Callable[[MicroBatch], Mapping[str, int]]
) -> Mapping[int, Counter[str]]:
    """Return the calls in all micro-batches before each one, by its number."""
    calls: Counter[str] = Counter()
    before = {}
    for each in ordered:
        before[each.number] = calls.copy()
        calls.update(calls_of(each))
    return before


def _calls_of_modules(micro_batch: MicroBatch) -> dict[str, int]:
    calls: Counter[str] = Counter()
    for tap in micro_batch.taps.taps:
        calls[tap.module] = max(calls[tap.module], tap.call + 1)
    return calls


def _parameters_with_gradients(micro_batch: MicroBatch) -> dict[str, int]:
    return {f"{tap.module}.{tap.item}": 1 for tap in micro_batch.taps.taps if tap.kind == "parameter gradient"}


_NUMBERS_APART = 10**9
"""Distance of the numbers of tensors of two micro_batches, more than there are taps in any each."""
