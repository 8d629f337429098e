"""Findings of an exploration as plain data, which the text and the JSON file have in common."""

from typing import Literal

import msgspec

from conformance.sim.recorded import Place


class Issued(msgspec.Struct, frozen=True):
    """Operator, or access of the host to pinned memory, and where in the program it was issued."""

    number: int
    """Number of the operator in its process, from 1; 0 for the host."""
    operator: str
    stream: str
    program: Place | None
    torch: Place | None
    node: str
    """Node of autograd; empty outside of a backward pass."""


class Pair(msgspec.Struct, frozen=True):
    """Two operators that access the same bytes, one of them writing, on streams that no event orders."""

    process: str
    first: Issued
    second: Issued
    released: Place | None
    """Line that let go of the memory of the first, where the second is the next to get it; otherwise None."""
    is_reuse: bool
    count: int
    """Number of such pairs with the same operators, streams and lines."""
    wait: Place | None = None
    """Line at which the host's wait for a number, or for all streams, is the only thing that orders the pair."""


class Difference(msgspec.Struct, frozen=True):
    """First bits of a process that are not those of the eager run."""

    process: str
    kind: Literal["read", "memory", "operators", "ended"]
    """Bytes that the host read; memory in use at the end; another sequence of operators; another end of the process."""
    what: str
    """Operator and its occurrence, or the memory."""
    place: Place | None
    count: int
    """Number of all reads or blocks of the process that differ."""


class ScheduleRun(msgspec.Struct, frozen=True):
    """Outcome of the command under one schedule."""

    schedule: str
    status: int
    """Exit status of the command, negative for a signal."""
    duration_s: float
    differences: list[Difference]
    """First difference of each process, and of the command, to the eager run."""
    ending: str
    """End of the output if the status is not that of the eager run; otherwise empty."""


class Smallest(msgspec.Struct, frozen=True):
    """Schedule that delays the fewest operators and still changes bits."""

    schedule: str
    found_from: str
    """Schedule that showed the difference first."""
    delayed: list[Issued]
    """Delayed operator of each process; the first of them if there are several, and the last."""
    process: str
    runs: int
    """Number of runs that the search needed."""


class Coverage(msgspec.Struct, frozen=True):
    """Number of different executions among the runs."""

    runs: int
    orders: int
    """Distinct orders in which the operators ran."""
    pairs: int
    """Unordered pairs that two schedules could run either way round."""
    pair_orders: int
    """Distinct orders of these pairs."""


class Exploration(msgspec.Struct, frozen=True):
    """Outcome of a command under all schedules."""

    command: list[str]
    processes: list[str]
    operators: int
    """Number of operators of all processes in the eager run."""
    runs: list[ScheduleRun]
    nondeterministic: list[Difference]
    """Differences between two eager runs: those of other schedules then show nothing."""
    pairs: list[Pair]
    shown: list[list[str]]
    """For each pair the schedules that change bits and run it the other way round."""
    held_by_waits: list[Pair]
    """Pairs that only the host's waits order."""
    queries: list[Place]
    """Lines that ask whether a stream or an event is done: the answer depends on the schedule."""
    smallest: Smallest | None
    explained_by: list[int]
    """Indices of the pairs that the smallest schedule, or else the first that changes bits, runs the other way round."""
    coverage: Coverage

    @property
    def is_clean(self) -> bool:
        """True if no schedule changes a bit and every pair of accesses is ordered."""
        return not (self.pairs or self.nondeterministic or any(run.differences for run in self.runs))
