"""Evidence on which laws judge a subject: the record of its ranks on a cell, and its model in one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from conformance.bound import Bound, bound
from conformance.oracles.tolerance import FP32_ROUNDOFF
from conformance.plan.cells import Cell
from conformance.run.shards import CapturedShards
from conformance.subjects.cells import SubjectCell, subject_cell
from conformance.subjects.facts import OwnErrors, ReferenceFacts, SubjectFacts

FP32_FACTOR = 8.0
"""Multiple of the largest of four own errors in fp32 that a correct parallel run stays below.

A parallel run adds the same numbers in one more order, so its error has the distribution of the own errors (the sums
are as long, see `oracles.tolerance`, Higham and Mary). For a tensor of one element, the worst case, errors are about
normal numbers Z of one variance: P(|Z| > 8 max |Z_1..4|) = E[P(|Z_1| < |Z| / 8)^4] is about (0.8 / 8)^4 E[Z^4] = 3e-4;
and the own error of all tensors together, which is the bound's other term, is never small by chance. Over more
elements deviations vary by less. Faults change gradients by parts of themselves, that is by 1e-3 and more.
"""
BF16_FACTOR = 4.0
"""Multiple of the own error in bf16 that a correct parallel run stays below.

Rounding points are those of one process, so that errors are about equal; tensor parallelism rounds two partial sums and
their sum where one process rounds once, and gradients that are reduced in bf16 are rounded once more: twice in both.
"""


class SubjectRecord(CapturedShards):
    """Record of the ranks of a subject on a cell."""

    def __init__(self, directory: Path, cell: Cell, facts: Sequence[SubjectFacts]) -> None:
        super().__init__(directory, name=cell.id, world_size=cell.world_size)
        self.cell = subject_cell(cell)
        self._facts = facts

    @property
    def ranks(self) -> Sequence[SubjectFacts]:
        """Facts by rank."""
        return self._facts

    def gradients(self, step: int, *, clipped: bool = False) -> dict[str, Tensor]:
        """Return the full gradients of a step by parameter; empty if nothing got one."""
        prefix = f"step{step}/{'clipped' if clipped else 'gradient'}/"
        return self.select(prefix) if any(key.startswith(prefix) for key in self.shards[0]) else {}

    def parameters_after(self, step: int) -> dict[str, Tensor]:
        """Return the full parameters after a step."""
        last = step == len(self.cell.accumulation) - 1
        return self.select("final/parameter/" if last else f"step{step + 1}/parameter/")


@dataclass(frozen=True)
class Reference:
    """Model of a subject in one process: facts, tensors of the more accurate process, and bounds."""

    directory: Path
    file: str
    facts: ReferenceFacts

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors of the reference by key, see `tasks.REFERENCE_FILE`."""
        with safe_open(self.directory / self.file, framework="pt") as tensors:
            return {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118 - it is no mapping

    def below(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose keys begin with a prefix, by the rest of the key."""
        return {key.removeprefix(prefix): t for key, t in self.tensors.items() if key.startswith(prefix)}

    def gradient_bounds(self, step: int) -> dict[str, Bound]:
        """Return the bound of each gradient in fp32."""
        return _bounds(self.facts.gradients[step], FP32_FACTOR)

    def update_bounds(self, step: int) -> dict[str, Bound]:
        """Return the bound of the change of each parameter since the start, in fp32."""
        return _bounds(self.facts.updates[step], FP32_FACTOR)

    def bf16_gradient_bounds(self, errors: OwnErrors) -> dict[str, Bound]:
        """Return the bound of each gradient in bf16."""
        return _bounds(errors, BF16_FACTOR)

    def number_bound(self, own: float) -> Bound:
        """Return the bound of a loss or a norm with an own error, in fp32."""
        overall = max(errors.overall for errors in self.facts.gradients)
        return measured_bound(FP32_FACTOR, own, overall)


@dataclass(frozen=True)
class Evidence:
    """Record of a cell, with the reference for its data."""

    record: SubjectRecord
    reference: Reference

    @property
    def cell(self) -> SubjectCell:
        """Cell that was run."""
        return self.record.cell

    @property
    def steps(self) -> range:
        """Numbers of the steps."""
        return range(len(self.cell.accumulation))


def measured_bound(factor: float, own: float, overall: float) -> Bound:
    """Return the bound of a quantity with an own error, among tensors that have another error together."""
    return bound("factor * max(own, overall, u)", factor=factor, own=own, overall=overall, u=FP32_ROUNDOFF)


def _bounds(errors: OwnErrors, factor: float) -> dict[str, Bound]:
    return {name: measured_bound(factor, own, errors.overall) for name, own in errors.by_name.items()}
