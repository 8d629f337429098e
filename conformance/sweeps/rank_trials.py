"""Calls with an argument that differs on one rank, each in fresh processes: raised, silent, waiting for ever, or dead.

Every rank forks a child for every call, with a process group of its own that has a short time limit: a collective
without its peers ends in seconds, and what it leaves behind (a torn connection, a mesh, a dead process) reaches no
other call.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from conformance.run.ranks.process import end_with_parent
from conformance.sweeps.trials import WAITED

LIMITS_S = (1.0, 5.0)
"""Time limits of collectives: of a call, and of its repetition if its outcome is worse than the recorded one.

A rank that is alone in a collective waits for ever. On a slow machine one that is not may seem to.
"""
_DEADLINE_S = 6.0
"""Time that a child gets beyond the limit of its collectives."""
_POLL_S = 0.005


class End(StrEnum):
    """End of a call on one rank."""

    RIGHT = "right"
    """Values are those of a call in which all ranks have the arguments of rank 0."""
    WRONG = "wrong"
    RAISED = "raised"
    WAITED = "waited"
    """The rank has waited for another one until the time limit, or lost the connection to it."""
    DIED = "died"


class Outcome(StrEnum):
    """Outcome of a call on all ranks, the best first."""

    RIGHT = "right"
    LOUD = "raises on all ranks"
    DIES = "a process dies"
    """gloo ends a process that gets more bytes than it expects; peers die, lose the connection, or have ended."""
    ALONE = "raises on some ranks"
    """Other ranks wait, or go on."""
    WAITS = "waits"
    GROUP_GOES_ON = "a group goes on"
    """Ranks of one group wait, raise or die, while at least two others come to an end, right or wrong."""
    WRONG = "silent and wrong"

    @property
    def severity(self) -> int:
        """Number that grows with the damage.

        Whether a rank that meets another collective waits, dies, or raises an error depends on the time at which gloo
        gets the bytes of its peer: of the same call each was seen. These outcomes are one.
        """
        return {Outcome.RIGHT: 0, Outcome.LOUD: 1, Outcome.WRONG: 3}.get(self, 2)


def outcome_of(ends: Sequence[End]) -> Outcome:
    """Return the outcome of a call that ranks ended so.

    >>> outcome_of([End.RAISED, End.WAITED]).value
    'raises on some ranks'
    """
    kinds = set(ends)
    ended = sum(end in (End.RIGHT, End.WRONG) for end in ends)
    for only, outcome in ((End.RIGHT, Outcome.RIGHT), (End.RAISED, Outcome.LOUD)):
        if kinds == {only}:
            return outcome
    if 1 < ended < len(ends):
        return Outcome.GROUP_GOES_ON
    for any_of, outcome in ((End.DIED, Outcome.DIES), (End.RAISED, Outcome.ALONE), (End.WAITED, Outcome.WAITS)):
        if any_of in kinds:
            return outcome
    return Outcome.WRONG


class RankEnd(msgspec.Struct, frozen=True):
    """End of a call on one rank, with its error or its wrong values."""

    end: End
    text: str = ""


@dataclass(frozen=True)
class OddWorld:
    """World of one call, in which the last rank is the odd one."""

    rank: int
    size: int
    directory: Path
    """Directory of the call, which all ranks share."""
    limit_s: float
    """Time limit of collectives."""
    tp: int = 1
    """Number of neighbouring ranks that share the work of tensor parallelism."""

    @property
    def is_odd(self) -> bool:
        """True on the rank whose argument differs."""
        return self.rank == self.size - 1

    def group(self, ranks: list[int] | None = None) -> dist.ProcessGroup:
        """Return a new process group, of all ranks by default, with the time limit of the call."""
        group: dist.ProcessGroup = dist.new_group(ranks, timeout=timedelta(seconds=self.limit_s))
        return group

    @property
    def data_rank(self) -> int:
        """Coordinate of the rank in `mesh`."""
        return self.rank // self.tp

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Mesh of the ranks with this coordinate in tensor parallelism; without it, of all, over the default group."""
        if self.tp > 1:
            return self.grid["ranks"]
        return init_device_mesh("cpu", (self.size,), mesh_dim_names=("ranks",))

    @cached_property
    def grid(self) -> DeviceMesh:
        """Mesh of all ranks, in rows of `tp`."""
        ranks = torch.arange(self.size).view(-1, self.tp)
        columns, rows = ([self.group(each) for each in lines.tolist()] for lines in (ranks.T, ranks))
        own = [columns[self.rank % self.tp], rows[self.data_rank]]
        return DeviceMesh.from_group(own, "cpu", mesh=ranks, mesh_dim_names=("ranks", "tp"))


OddCall = Callable[[OddWorld], Mapping[str, str]]
"""Function that calls an interface on one rank of a world; it returns wrong values by name, with texts."""


@dataclass(frozen=True)
class RankTrials:
    """Trials of one rank, which meets the others in files of a directory."""

    rank: int
    size: int
    directory: Path

    def ended(self, number: int, call: OddCall, *, no_worse_than: Outcome) -> list[RankEnd]:
        """Return the end of a call on every rank; a call that ends worse is repeated with a longer limit."""
        for attempt, limit_s in enumerate(LIMITS_S):
            place = self.directory / f"{number}-{attempt}"
            place.mkdir(exist_ok=True)
            own = in_child(call, OddWorld(self.rank, self.size, place, limit_s))
            ends = self._exchanged(place, own)
            if outcome_of([each.end for each in ends]).severity <= no_worse_than.severity:
                break
        return ends

    def _exchanged(self, place: Path, own: RankEnd) -> list[RankEnd]:
        """Return the ends of all ranks, each of which writes a file."""
        write(place / f"end{self.rank}", own)
        files = [place / f"end{rank}" for rank in range(self.size)]
        while not all(file.exists() for file in files):
            time.sleep(_POLL_S)
        return [read(file) for file in files]


def write(file: Path, end: RankEnd) -> None:
    """Write an end at once, so that no reader sees a part of it."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    unfinished.write_bytes(msgspec.json.encode(end))
    unfinished.rename(file)


def read(file: Path) -> RankEnd:
    """Return the end in a file."""
    return msgspec.json.decode(file.read_bytes(), type=RankEnd)


def in_child(call: OddCall, world: OddWorld) -> RankEnd:
    """Return the end of a call in a child of this process, which is killed if it does not end by itself."""
    own = world.directory / f"own{world.rank}"
    child = os.fork()
    if child == 0:
        _serve(call, world, own)
    deadline_s = time.monotonic() + world.limit_s + _DEADLINE_S
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return RankEnd(End.WAITED, f"killed after {world.limit_s + _DEADLINE_S} s")
        time.sleep(_POLL_S)
    return read(own) if own.exists() else RankEnd(End.DIED, "the process died")


def _serve(call: OddCall, world: OddWorld, own: Path) -> NoReturn:
    """Make the call in this child, write its end, and leave without any clean-up of torch.

    A rank that has ended well stays until its peers have, too: it would tear their connections.
    """
    try:
        end_with_parent()
        end = _called(call, world)
        write(own, end)
        if end.end in (End.RIGHT, End.WRONG):
            _await_peers(world)
    finally:
        os._exit(0)


def _await_peers(world: OddWorld) -> None:
    files = [world.directory / f"own{rank}" for rank in range(world.size)]
    deadline_s = time.monotonic() + world.limit_s + 1.0
    while time.monotonic() < deadline_s and not all(file.exists() for file in files):
        time.sleep(_POLL_S)


def _called(call: OddCall, world: OddWorld) -> RankEnd:
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{world.directory / 'store'}",
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=world.limit_s),
        )
        dist.barrier()  # so that all ranks have come before a limit applies to them
        wrong = call(world)
    except BaseException as error:  # as those of checkpoints are
        text = f"{type(error).__name__}: {error}"
        return RankEnd(End.WAITED if WAITED.search(text) else End.RAISED, text[:300])
    first = next(iter(wrong.items()), None)
    return RankEnd(End.RIGHT) if first is None else RankEnd(End.WRONG, f"{first[0]}: {first[1]}"[:300])
