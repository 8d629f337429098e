"""Record store: a directory in which each cell is run once per session, by the worker that needs its record first."""

import copy
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock

from conformance.outcomes import CellFailed, Failure
from conformance.run.devices.hardware import NO_DEVICES, Hardware
from conformance.run.devices.leases import LIMIT_S as LEASE_LIMIT_S
from conformance.run.pool import Pools, RunsTasks
from conformance.run.record import (
    Header,
    Record,
    RecordFile,
    read_failures,
    read_record,
    read_results,
    write_failure,
    write_record,
)

KEPT = 16
"""Number of records that a process holds in memory: of the current cells, and of common references.

All other records are read again when a law needs them, so that memory does not grow with the number of cases."""

Execute = Callable[[Path], RecordFile]
"""Function that runs a header's experiment in a directory and returns the content to publish there."""


class Unwritable(RuntimeError):
    """Failure to write the records of a session."""


@dataclass
class Clock:
    """Time that one case has spent on records, in seconds."""

    wait_s: float = 0.0
    """Time spent waiting for another worker that ran the same cell, and for devices or processors."""
    run_s: float = 0.0
    """Time spent running cells."""


@dataclass
class RecordStore:
    """Records below a directory, and the settings that all runs of a session share."""

    directory: Path
    session: str
    torch_version: str
    defect: str | None
    deadline_s: float
    """Time limit of all runs of one case together."""
    pools: RunsTasks = field(default_factory=Pools)
    shares_ranks: bool = False
    """True if ranks also serve stores with other defects, for defects that leave harmless traces in a process."""
    replay: bool = False
    """True if nothing is run, since every needed record must exist already."""
    hardware: Hardware = NO_DEVICES
    subject: str | None = None
    """Trainer that is judged, as `known_trainers.resolve` takes its name; None for the reference trainer."""
    sweep_share: float = 1.0
    """Share of the samples that sweeps try, see `Profile.sweep_share`."""
    covers_torch: bool = False
    """True if ranks leave the coverage of torch's own Python in each record, see `torch_coverage.recording`."""

    def __post_init__(self) -> None:
        self._finished: set[Path] = set()
        self._records = lru_cache(maxsize=KEPT)(_record)
        self._results = lru_cache(maxsize=KEPT)(read_results)

    def record(self, header: Header, train: Execute, clock: Clock) -> Record:
        """Return the record with this header; `train` makes the record unless the session has it already.

        Raises CellFailed if the run did not finish, Unwritable if records cannot be written.
        """
        return self._records(self.run(header, train, clock))

    def results(self, header: Header, measure: Execute, clock: Clock) -> list[Any]:
        """Return the result of each rank in builtin types; runs `measure` and raises as `record` does."""
        return self._results(self.run(header, measure, clock))

    def within(self, limit_s: float) -> "RecordStore":
        """Return a store whose cases have at most this time; both share their caches."""
        shorter = copy.copy(self)
        shorter.deadline_s = min(self.deadline_s, limit_s)
        return shorter

    def lengthen(self, slower: float) -> None:
        """Lengthen the time limit on a machine that is so many times slower than that of matrix.lock."""
        self.deadline_s *= max(1.0, slower)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Open a context that only writes records: an OSError there raises Unwritable."""
        try:
            yield
        except OSError as error:
            raise Unwritable(f"no record can be written to {self.directory}: {error.strerror or error}") from error

    def close(self) -> None:
        """End all ranks."""
        self.pools.close()

    def left_s(self, clock: Clock) -> float:
        """Return the time that earlier runs of a case have left of its deadline; raises CellFailed for none."""
        left_s = self.deadline_s - clock.run_s
        if left_s <= 0:
            reason = f"earlier runs of this case used up its deadline of {self.deadline_s:g} s"
            raise CellFailed(Failure(kind="timeout", first_rank=0, reason=reason, details=""))
        return left_s

    def directory_of(self, header: Header) -> Path:
        """Return the directory of the run with this header, whether it exists or not."""
        return self.directory / f"{header.cell.id}--{_digest(header)}"

    def run(self, header: Header, execute: Execute, clock: Clock) -> Path:
        """Return the directory of the finished run with this header, which `execute` makes unless it is there."""
        directory = self.directory_of(header)
        if directory in self._finished:
            return directory
        if self.replay:
            _require_recorded(directory)
        else:
            self._locked(directory, execute, clock)
        self._finished.add(directory)
        return directory

    def _locked(self, directory: Path, execute: Execute, clock: Clock) -> None:
        with self.writing():
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "lock").touch()
        start_s = time.monotonic()
        # A run cannot outlast its lease and its deadline by much, so neither can waiting for that run.
        with FileLock(directory / "lock", timeout=4 * self.deadline_s + LEASE_LIMIT_S):
            clock.wait_s += time.monotonic() - start_s
            content = read_record(directory)
            if content is None:
                content = self._executed(directory, execute, clock)
        _require_finished(content)

    def _executed(self, directory: Path, execute: Execute, clock: Clock) -> RecordFile:
        start_s, waited_before_s, trained_before_s = time.monotonic(), self.pools.waited_s, self.pools.trained_s
        try:
            content = execute(directory)
        except CellFailed as failed:
            with self.writing():
                write_failure(directory, failed.failure)
            raise
        finally:
            waited_s = self.pools.waited_s - waited_before_s
            run_s = time.monotonic() - start_s - waited_s
            clock.wait_s += waited_s
            clock.run_s += run_s
        with self.writing():
            if content.failure is not None and content.failure.kind == "crash":
                # A rank's death belongs to the case that saw it, and may have come from outside (the OOM killer): the
                # other laws of the cell get another run. Hangs are kept: each law would wait for the deadline.
                write_failure(directory, content.failure)
            else:
                train_s = round(self.pools.trained_s - trained_before_s, 4)
                write_record(directory, msgspec.structs.replace(content, run_s=round(run_s, 4), train_s=train_s))
        return content


def _record(directory: Path) -> Record:
    content = read_record(directory)
    assert content is not None, f"the record in {directory} has disappeared"
    return Record(directory, content)


def _require_recorded(directory: Path) -> None:
    """Raise CellFailed as the session did, ValueError if the session has left neither record nor failure."""
    content, failures = read_record(directory), read_failures(directory)
    if content is None and failures:
        raise CellFailed(failures[-1])
    if content is None:
        raise ValueError(
            f"no record {directory.name}: the laws of this version ask for a run that the session did not make"
        )
    _require_finished(content)


def _require_finished(content: RecordFile) -> None:
    if content.failure is not None:
        raise CellFailed(content.failure)


def _digest(header: Header) -> str:
    return hashlib.sha256(msgspec.json.encode(header)).hexdigest()[:12]
