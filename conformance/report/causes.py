"""First causes of the failures of another trainer: one for each cell, the failures that follow from it folded under it.

A cell's first failure is that of the earliest step, and in a step of the law that comes first in the order of
causes: what is wrong before a forward pass makes gradients wrong, wrong gradients make norms and parameters wrong.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Protocol, TypeVar

import msgspec

from conformance.report.wording import counted

CAUSAL_ORDER = (
    "fsdp-is-on",
    "tensor-parallelism-is-on",
    "partition",
    "tied-weights",
    "fp32-masters",
    "initialised",
    "initial-weights",
    "bf16-is-used",
    "parameters-are-gathered",
    "same-collectives",
    "no-needless-collectives",
    "wire-dtypes",
    "gradients-are-reduced",
    "every-gradient",
    "gradients",
    "bf16-gradients",
    "resharded",
    "replicas",
    "gradient-norm",
    "clipping-reduces-norms",
    "clipping",
    "optimizer-holds-each-once",
    "every-update",
    "parameters",
    "bf16-parameters",
    "loss",
    "unordered-accesses",
    "schedules-agree",
    "memory-held",
    "memory-by-phase",
    "memory-of-steps",
    "memory-of-streams",
)
"""Laws of any trainer in the order of causes: built, initial values, forward, reduction, clipping, optimizer, loss."""
_BUILT = CAUSAL_ORDER[: CAUSAL_ORDER.index("bf16-is-used")]
"""Laws about the model as it was built."""
_ENDED = ("optimizer-holds-each-once", *CAUSAL_ORDER[CAUSAL_ORDER.index("loss") + 1 :])
"""Laws about the end of a run."""
_NO_STEP = 1_000_000
_STEP = re.compile(r"\bstep ?(\d+)")
_SHOWN_CELLS = 3
_INSTALLED = re.compile(r'^  File "[^"]*(site-packages|/lib/python)')
_MOST_INSTALLED = 3


class FailedCase(Protocol):
    """Part of `schema.CaseResult` that the order of causes needs."""

    @property
    def law(self) -> str:
        """Id of the law."""

    @property
    def reason(self) -> str:
        """Reason of the failure."""


FailedCaseT = TypeVar("FailedCaseT", bound=FailedCase)


class CellCause(msgspec.Struct, frozen=True, kw_only=True):
    """First cause of the failures on one cell."""

    cell: str
    key: str
    """Text by which causes on several cells are one."""
    sentence: str
    where: str = ""
    traceback: str = ""
    log: str = ""


class Cause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First cause of the failures on some cells of another trainer."""

    cells: list[str]
    """Ids of the cells, the simplest first."""
    law: str
    """First law in the order of causes that fails on the first cell."""
    sentence: str
    """Cause in the words of the trainer's author."""
    where: str
    """Place in the trainer: the tensor, and the line of source; empty if it is not known."""
    follows: list[str]
    """Further laws that fail on these cells, in the order of causes."""
    traceback: str = ""
    """Frames of the trainer and its packages where a rank ended, if one did."""
    log: str = ""
    """File with the output, tracebacks and stacks of all ranks, below the report's directory; empty if none ended."""

    @property
    def on(self) -> str:
        """Cells in words: `dp2-fp32-default-full and 4 more cells`."""
        shown = ", ".join(self.cells[:_SHOWN_CELLS])
        more = len(self.cells) - _SHOWN_CELLS
        return f"{shown} and {counted(more, 'more cell')}" if more > 0 else shown

    @property
    def consequences(self) -> str:
        """Folded laws in words: `and 2 laws that follow: parameters, loss`; empty without any."""
        if not self.follows:
            return ""
        verb = "law that follows" if len(self.follows) == 1 else "laws that follow"
        return f"and {len(self.follows)} {verb}: {', '.join(self.follows)}"

    @property
    def short_traceback(self) -> list[str]:
        """Lines of the traceback, with all frames of the author and few of installed packages."""
        return list(_without_long_runs(self.traceback))


def causal_position(law: str) -> int:
    """Return the place of a law of any trainer in the order of causes; one for all other laws."""
    return CAUSAL_ORDER.index(law) if law in CAUSAL_ORDER else len(CAUSAL_ORDER)


def in_causal_order(cases: Iterable[FailedCaseT]) -> list[FailedCaseT]:
    """Return failed cases of one cell, that of the first cause at the front."""
    return sorted(cases, key=lambda case: (_step(case), causal_position(case.law), case.law))


def _step(case: FailedCase) -> int:
    """Return the step in which a law has failed; -1 for one about the built model, a large number for the end."""
    if case.law in _BUILT:
        return -1
    found = _STEP.search(case.reason)
    if found and case.law not in _ENDED:
        return int(found[1])
    return _NO_STEP if case.law in _ENDED else 0


def merged(found: Sequence[CellCause], failed: Mapping[str, Sequence[FailedCase]]) -> list[Cause]:
    """Return the causes, those that are the same on several cells as one; `failed` are the failed cases by cell."""
    groups: dict[str, list[CellCause]] = {}
    for each in found:
        groups.setdefault(each.key, []).append(each)
    causes = []
    for group in groups.values():
        first, *_ = in_causal_order(failed[group[0].cell])
        laws = {case.law for each in group for case in failed[each.cell]} - {first.law}
        causes.append(
            Cause(
                cells=[each.cell for each in group],
                law=first.law,
                sentence=group[0].sentence,
                where=group[0].where,
                follows=sorted(laws, key=lambda law: (causal_position(law), law)),
                traceback=group[0].traceback,
                log=group[0].log,
            )
        )
    return sorted(causes, key=lambda cause: -len(cause.cells))


def _without_long_runs(traceback: str) -> Iterator[str]:
    """Yield the lines of a traceback; of more than three frames of installed packages in a row, the last one."""
    frames: list[list[str]] = []
    for line in traceback.splitlines():
        if line.startswith("    ") and frames and frames[-1][0].startswith("  File"):
            frames[-1].append(line)
        else:
            frames.append([line])
    for is_installed, run in groupby(frames, key=lambda frame: _INSTALLED.search(frame[0]) is not None):
        entries = list(run)
        if is_installed and len(entries) > _MOST_INSTALLED:
            yield f"  ... {len(entries) - 1} frames of installed packages"
            entries = entries[-1:]
        for entry in entries:
            yield from entry
