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
    """Two operators that access the same bytes, one of them writing, on streams that no event orders.

    It stands for all pairs with the same operators, streams and lines.
    """

    first: Issued
    second: Issued
    is_reuse: bool
    """True if the memory of the first was released in between, and the second is the next that may get it."""
    released: Place | None
    """Line that released it."""
    wait: Place | None
    """Line at which the host's wait for a number, or for all streams, is the only thing that orders the pair."""
    members: dict[str, list[tuple[int, int]]]
    """Numbers of both operators of each such pair, by process; an access of the host has number 0."""
    inverted_under: list[str]
    """Schedules that ran one of the pairs the other way round than it was issued."""


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
    """The delayed operator, or the first and the last of them, in one process."""
    process: str
    runs: int
    """Number of runs that the search needed."""


class Coverage(msgspec.Struct, frozen=True):
    """Number of different executions among the runs."""

    runs: int
    orders: int
    """Distinct orders in which the operators ran."""
    pairs: int
    """Unordered pairs, which a schedule may run either way round."""
    pair_orders: int
    """Distinct orders of all these pairs."""


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
    held_by_waits: list[Pair]
    """Pairs that only the host's waits order."""
    queries: list[Place]
    """Lines that ask whether a stream or an event is done: the answer depends on the schedule."""
    smallest: Smallest | None
    explained_by: list[int]
    """Indices of the pairs that the smallest schedule, or else the first that changes bits, runs the other way round;
    if a delayed operator is the first of some of them, of these alone."""
    coverage: Coverage

    @property
    def is_clean(self) -> bool:
        """True if no schedule changes a bit and every pair of accesses is ordered."""
        return not (self.pairs or self.nondeterministic or any(run.differences for run in self.runs))
