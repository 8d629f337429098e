"""Trials of an interface on all ranks of a mesh: right, refused, wrong, or without agreement of the ranks.

After each trial ranks exchange how it ended, over a process group of their own: a call that raises on one rank alone
leaves its peers waiting, which is a fault, too. The mesh is then replaced, since its process group is unusable.
"""

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from conformance.outcomes import SweptOutcome
from conformance.run.failures import PEER_LOSS_MESSAGE

AGREEMENT = "agreement"
"""Fault of a call that raises, or waits, on some ranks only."""
REFUSAL = "refusal"
"""Fault of a call that raises on all ranks although its documentation allows it."""
WITHOUT_EXPECTATION = "full tensors"
"""Fault of a call that raises on full plain tensors, with whose outcome that on shards is compared."""
_WAIT_LIMIT_S = 0.5
"""Time limit of the mesh's collectives in a call that is made for the first time."""
_WAIT_LIMIT_AFTER_ERROR_S = 2.0
"""Time limit in the repetition of a call that raised an error on some ranks while others waited.

On a slow machine these may have waited for each other, and would have raised the error, too.
"""
_WAIT_LIMIT_AFTER_WAITING_S = 10.0
"""Time limit in the repetition of a call that raised no error that explains the waiting: the machine may be slow."""
_MESHES = itertools.count(1)
"""Numbers of the meshes of all trials of this process."""
WAITED = re.compile(
    f"{PEER_LOSS_MESSAGE.pattern}|(connect|connection|write) time(d )?out|timeout waiting|pair closure", re.IGNORECASE
)
"""Errors of a rank that has waited for another one, as gloo and the store of a process group word them."""

_VARYING = re.compile(r"0x[0-9a-f]+|\d+|DeviceMesh\(.*")
_MAX_ERROR = 72
"""Length of the text of an error, which tells errors of one class apart."""

Sample = TypeVar("Sample")
Expected = TypeVar("Expected")

Call = Callable[[DeviceMesh], Mapping[str, str]]
"""Function that tries an interface on a mesh; it returns its faults, each with a text, or raises if that refuses."""


def select_samples(
    samples: Iterable[Sample], subject: Callable[[Sample], str], *, restricted_to: Collection[str]
) -> list[Sample]:
    """Return the samples of the subjects that sweeps are restricted to, or all if this sweep has none of them."""
    every = list(samples)
    return [sample for sample in every if subject(sample) in restricted_to] or every


class Wrong(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that an interface shows in some cases of one kind."""

    subject: str
    fault: str
    kind: str
    cases: int
    """Number of cases that show it."""
    example: str
    """The first of these cases, with its expected and measured values."""

    @property
    def name(self) -> str:
        """Name of the metric: subject, fault and kind."""
        return f"{self.subject}: {self.fault} of {self.kind}"


class Swept(msgspec.Struct, kw_only=True):
    """Outcome of a sweep on one rank; numbers of cases by subject: operator, optimizer, module or set of options."""

    outcomes: dict[SweptOutcome, int] = {}
    """Number of all cases by outcome; a case that ranks end differently is wrong. Equal on all ranks."""
    computed: dict[str, int] = {}
    refused: dict[str, int] = {}
    errors: dict[str, dict[str, int]] = {}
    """Errors of refused cases by subject, see `spelled_error`, each with the number of its cases."""
    communicating: dict[str, dict[str, int]] = {}
    """Number of cases that communicate by subject and pass, `forward` or `any pass`, where a sweep has looked."""
    wrong: list[Wrong] = []

    def count(self, outcome: SweptOutcome) -> None:
        """Count a case."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def add_failure(self, subject: str, ended: "Ended", kind: str) -> None:
        """Record how a refused or wrong case ended, the only one of its subject."""
        if ended.end is End.ERROR and ended.error is not None:
            self.computed[subject], self.refused[subject] = 0, 1
            self.errors[subject] = {spelled_error(ended.error): 1}
        for fault, text in ended.faults.items():
            self.wrong.append(Wrong(subject=subject, fault=fault, kind=kind, cases=1, example=text))

    def add(self, other: "Swept") -> None:
        """Add the cases of another sweep, whose subjects are others."""
        for outcome, cases in other.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + cases
        self.computed.update(other.computed)
        self.refused.update(other.refused)
        self.errors.update(other.errors)
        self.communicating.update(other.communicating)
        self.wrong.extend(other.wrong)


class End(IntEnum):
    """End of a call on one rank."""

    RIGHT = 0
    WRONG = 1
    ERROR = 2
    WAITED = 3
    """The rank has waited for another one until the time limit."""


@dataclass(frozen=True)
class Ended:
    """End of a call on all ranks: the worst if all computed, an error if all raised one, or else no agreement."""

    end: End | None
    """None if ranks do not agree."""
    error: Exception | None
    """Error of this rank."""
    faults: Mapping[str, str]
    """Faults on this rank, each with a text."""

    @property
    def outcome(self) -> SweptOutcome:
        """Outcome of the case."""
        return "right" if self.end is End.RIGHT else "refused" if self.end is End.ERROR else "wrong"

    def judged(self, *, may_refuse: bool) -> "Ended":
        """Return the end with the fault that an error on all ranks is, since documented calls must not raise there.

        Unless the call may refuse.
        """
        if may_refuse or self.end is not End.ERROR:
            return self
        return Ended(End.WRONG, self.error, {REFUSAL: f"{self.error!r:.300}"})


@dataclass
class Trials:
    """Trials on a mesh of the shape of another one, whose process groups serve no trial."""

    shape_of: DeviceMesh
    mesh: DeviceMesh = field(init=False)
    """Mesh of the next trial."""
    _swept: Swept = field(default_factory=Swept)
    _found: dict[tuple[str, str, str], list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dist.all_reduce(torch.zeros(1))  # on the CPU, so that ranks meet before the short limits apply
        self.renew()

    @property
    def swept(self) -> Swept:
        """Outcome of all trials."""
        wrong = [
            Wrong(subject=subject, fault=fault, kind=kind, cases=len(examples), example=examples[0])
            for (subject, fault, kind), examples in self._found.items()
        ]
        return msgspec.structs.replace(self._swept, wrong=wrong)

    def add(self, subject: str) -> None:
        """Start the counts of a subject at 0, so that the outcome names it even without a case."""
        self._swept.computed.setdefault(subject, 0)
        self._swept.refused.setdefault(subject, 0)

    def attempt(self, subject: str, kind: str, case: str, call: Call, *, may_refuse: bool = True) -> End | None:
        """Try a case and return its end; None if ranks do not agree, or left others waiting in a case of its kind."""
        self.add(subject)
        if (subject, AGREEMENT, kind) in self._found:
            return None
        ended = self.ended(call).judged(may_refuse=may_refuse)
        self._swept.count(ended.outcome)
        if ended.end is End.ERROR:
            self._swept.refused[subject] += 1
            assert ended.error is not None
            errors, text = self._swept.errors.setdefault(subject, {}), spelled_error(ended.error)
            errors[text] = errors.get(text, 0) + 1
            return ended.end
        self._swept.computed[subject] += ended.end is not None
        self._note(subject, kind, case, ended.faults)
        return ended.end

    def expected(self, subject: str, kind: str, call: Callable[[], Expected]) -> Expected | None:
        """Return the result of a call on full plain tensors; None, counted as wrong, if it raises.

        A sample that torch refuses for full tensors, too, must not be in a sweep: it would be left out in silence, as
        would a mistake in a sample, or an operator that another torch changes.
        """
        self.add(subject)
        try:
            return call()
        except Exception as error:
            self._swept.count("wrong")
            self._note(subject, kind, "no shards", {WITHOUT_EXPECTATION: f"{error!r:.150}"})
            return None

    def ended(self, call: Call) -> Ended:
        """Call on all ranks, once more if they do not agree; return the end."""
        for _ in range(2):
            error, faults = _called(call, self.mesh)
            ends = _ends(error, faults)
            if set(ends) <= {End.RIGHT, End.WRONG} or set(ends) == {End.ERROR}:
                return Ended(max(ends), error, faults)
            is_explained = End.ERROR in ends
            limit_s = _WAIT_LIMIT_AFTER_ERROR_S if is_explained else _WAIT_LIMIT_AFTER_WAITING_S
            self.mesh = self._new_mesh(limit_s)
        self.renew()
        states = ", ".join(f"rank {rank}: {end.name.lower()}" for rank, end in enumerate(ends))
        return Ended(None, error, {AGREEMENT: f"{states}; here {error!r:.150}"})

    def renew(self) -> None:
        """Replace the mesh, whose process groups may have messages that a refused call has sent and none received."""
        self.mesh = self._new_mesh(_WAIT_LIMIT_S)

    def _note(self, subject: str, kind: str, case: str, faults: Mapping[str, str]) -> None:
        for fault, text in faults.items():
            self._found.setdefault((subject, fault, kind), []).append(f"{case}: {text}")

    def _new_mesh(self, limit_s: float) -> DeviceMesh:
        """Return a mesh of the same shape with new process groups.

        Its dimensions have names that no mesh of this process had: DTensor keeps sharding decisions by meshes that
        compare equal, and would use the groups of the mesh before, even those of an earlier sweep.
        """
        number = next(_MESHES)
        ranks, groups = self.shape_of.mesh, []
        for dim in range(ranks.ndim):
            rows = ranks.movedim(dim, -1).reshape(-1, ranks.size(dim)).tolist()
            row_groups = [dist.new_group(row, timeout=timedelta(seconds=limit_s)) for row in rows]
            groups.append(next(group for row, group in zip(rows, row_groups, strict=True) if dist.get_rank() in row))
        names = tuple(f"trials{number}_{dim}" for dim in range(ranks.ndim))
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], self.shape_of.device_type, mesh_dim_names=names)
        return DeviceMesh.from_group(groups, self.shape_of.device_type, mesh=ranks, mesh_dim_names=names)


def spelled_error(error: Exception) -> str:
    """Return the class of an error and the beginning of its first line, without numbers and objects that vary.

    >>> spelled_error(RuntimeError("shape '[6, 4]' is invalid for input of size 20"))
    "RuntimeError: shape '[#, #]' is invalid for input of size #"
    """
    lines = str(error).strip().splitlines()
    text = _VARYING.sub("#", lines[0] if lines else "")
    return f"{type(error).__name__}: {text:.{_MAX_ERROR}}"


def _called(call: Call, mesh: DeviceMesh) -> tuple[Exception | None, Mapping[str, str]]:
    try:
        return None, call(mesh)
    except Exception as error:
        return error, {}


def _ends(error: Exception | None, faults: Mapping[str, str]) -> list[End]:
    """Return the end of a call on each rank."""
    end = End.WRONG if faults else End.RIGHT
    if error is not None:
        end = End.WAITED if WAITED.search(str(error)) else End.ERROR
    ends = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    ends[dist.get_rank()] = end
    dist.all_reduce(ends)
    return [End(value) for value in ends.tolist()]
