"""The record store: each cell is run once per session, whichever worker needs it first."""

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock

from conformance.engine.cells import Cell
from conformance.engine.pool import Pools, RunFailed, Task
from conformance.engine.record import Failure, Header, Record, RecordFile, read_record, write_record

SUITE_PACKAGE = Path(__file__).resolve().parents[1]


class CellFailed(Exception):
    """A cell's run did not finish. Unless a rank died, every law on that cell gets the same verdict."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.reason}\n{failure.details}")
        self.failure = failure


@dataclass
class Clock:
    """Where the time of one case went."""

    wait_s: float = 0.0
    """Waiting for another worker that was running the same cell."""
    run_s: float = 0.0
    """Running cells."""


@dataclass
class RecordStore:
    """Runs cells and keeps their records below `directory`."""

    directory: Path
    session: str
    torch_version: str
    defect: str | None
    deadline_s: float
    pools: Pools = field(default_factory=Pools)
    clock: Clock = field(default_factory=Clock)
    _loaded: dict[str, Record] = field(default_factory=dict)
    _measured: dict[tuple[str, str, bool], list[Any]] = field(default_factory=dict)

    def run(self, cell: Cell, *, repeat: int = 0) -> Record:
        """The record of a cell, from this session's store or from a run now; `repeat` asks for a further run of it.

        Raises CellFailed.
        """
        header = Header(
            cell=cell,
            session=self.session,
            torch=self.torch_version,
            substrate="gloo",
            defect=self.defect,
            repeat=repeat,
        )
        directory = self.directory / f"{cell.id}--{_digest(header)}"
        if directory.name in self._loaded:
            return self._loaded[directory.name]
        content = self._once(directory, lambda: self._execute(header, directory))
        if content.failure is not None:
            raise CellFailed(content.failure)
        return self._loaded.setdefault(directory.name, Record(directory, content))

    def probe(self, world_size: int) -> list[dict[str, Any]]:
        """Facts of all ranks of a world about their surroundings. Raises CellFailed."""
        try:
            return self.pools.run(
                Task("conformance.engine.rank_probes:probe", {}), world_size=world_size, deadline_s=self.deadline_s
            )
        except RunFailed as failed:
            raise CellFailed(to_failure(failed)) from None

    def measure(self, task: str, cell: Cell, *, alone: bool = False) -> list[Any]:
        """What a task, such as `rank_probes:probe`, measures on each rank of a cell's world, or in one process `alone`.

        Measured at most once in this process. Raises CellFailed.
        """
        key = task, cell.id, alone
        if key not in self._measured:
            self._measured[key] = self._measure(task, cell, alone=alone)
        return self._measured[key]

    def _measure(self, task: str, cell: Cell, *, alone: bool) -> list[Any]:
        world_size, kind = (1, f"{self._kind(cell)} alone") if alone else (cell.world_size, self._kind(cell))
        start_s = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            payload = task_payload(cell, Path(directory), defect=self.defect)
            measuring = Task(f"conformance.engine.{task}", payload, kind=kind)
            try:
                return self.pools.run(measuring, world_size=world_size, deadline_s=self._left_s(), env=cell.environment)
            except RunFailed as failed:
                raise CellFailed(to_failure(failed)) from None
            finally:
                self.clock.run_s += time.monotonic() - start_s

    def _left_s(self) -> float:
        """What earlier runs of the same case have left of its deadline. Raises CellFailed if that is nothing."""
        left_s = self.deadline_s - self.clock.run_s
        if left_s <= 0:
            reason = f"earlier runs of this case used up its deadline of {self.deadline_s:g} s"
            raise CellFailed(Failure(kind="timeout", first_rank=0, reason=reason, details=""))
        return left_s

    def close(self) -> None:
        self.pools.close()

    def _once(self, directory: Path, execute: Callable[[], RecordFile]) -> RecordFile:
        directory.mkdir(parents=True, exist_ok=True)
        start_s = time.monotonic()
        # A run cannot outlast its deadline by much, so neither can the wait for one.
        with FileLock(directory / "lock", timeout=4 * self.deadline_s):
            self.clock.wait_s += time.monotonic() - start_s
            content = read_record(directory)
            if content is None:
                start_s = time.monotonic()
                content = execute()
                self.clock.run_s += time.monotonic() - start_s
                if content.failure is not None and content.failure.kind == "crash":
                    # A death belongs to the case that saw it, and may have come from outside (the OOM killer): the
                    # cell's other laws get a run of their own. Hangs are kept, or each law would wait for the deadline.
                    (directory / "crash.txt").write_text(content.failure.details)
                else:
                    write_record(directory, content)
            return content

    def _execute(self, header: Header, directory: Path) -> RecordFile:
        cell = header.cell
        task = Task(
            "conformance.engine.rank_tasks:train_cell",
            task_payload(cell, directory, defect=self.defect),
            kind=self._kind(cell),
        )
        left_s = self._left_s()
        try:
            if cell.steps_before_save:
                left_s -= self._save(cell.saver, directory, deadline_s=left_s)
            results = self.pools.run(
                task, world_size=cell.world_size, deadline_s=max(1.0, left_s), env=cell.environment
            )
        except RunFailed as failed:
            return RecordFile(header=header, train_s=0.0, failure=to_failure(failed))
        facts = msgspec.Raw(msgspec.json.encode([result["facts"] for result in results]))
        return RecordFile(header=header, train_s=max(result["train_s"] for result in results), ranks=facts)

    def _save(self, saver: Cell, directory: Path, *, deadline_s: float) -> float:
        """Run what a resumed cell goes on from, in processes that are not used for what follows; returns its time."""
        start_s = time.monotonic()
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)  # of an earlier run that died
        kind = f"{self._kind(saver)} saves"
        task = Task(
            "conformance.engine.rank_tasks:train_and_save",
            task_payload(saver, directory, defect=self.defect),
            kind=kind,
        )
        self.pools.run(task, world_size=saver.world_size, deadline_s=deadline_s)
        return time.monotonic() - start_s

    def _kind(self, cell: Cell) -> str:
        """Which tasks may share processes.

        DTensor keeps sharding decisions with the mesh they were made for, and finds them again for any mesh that
        compares equal: the tp rows of dp4-tp2 and of hsdp2x2-tp2 do, but their process groups have other names
        ("Could not resolve the process group registered under the name 9", torch 2.13). No public way to clear it.
        """
        return f"{cell.mesh} {self.defect or ''}"


def task_payload(cell: Cell, directory: Path, *, defect: str | None) -> dict[str, Any]:
    """What the tasks of `rank_tasks`, `rank_probes` and their like are given."""
    from conformance.engine.workload import trainer_config  # imports torch, which is not needed to find records

    return {
        "config": msgspec.to_builtins(trainer_config(cell)),
        "world_size": cell.world_size,
        "weights": cell.weights,
        "steps_before_save": cell.steps_before_save,
        "saving": cell.saving,
        "defect": defect,
        "directory": str(directory),
    }


def to_failure(failed: RunFailed) -> Failure:
    """Keep what a report needs; an exception raised by the suite's own code is the suite's error."""
    first = next(report for report in failed.ranks if report.rank == failed.first_rank)
    from_suite = failed.kind == "raised" and Path(first.innermost_file).is_relative_to(SUITE_PACKAGE)
    kind = "suite-error" if from_suite else failed.kind
    return Failure(kind=kind, first_rank=failed.first_rank, reason=failed.reason, details=failed.details())


def _digest(header: Header) -> str:
    return hashlib.sha256(msgspec.json.encode(header)).hexdigest()[:12]
