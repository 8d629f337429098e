"""The record store: each cell is run once per session, whichever worker needs it first."""

import hashlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock

from conformance.judge.support import release
from conformance.plan.cells import Cell
from conformance.plan.substrates import REAL, Substrate
from conformance.project import PACKAGE
from conformance.run.devices.hardware import NO_DEVICES, Hardware, device_type
from conformance.run.devices.leases import LIMIT_S as LEASE_LIMIT_S
from conformance.run.pool import Pools, RunFailed, RunsTasks, Task
from conformance.run.record import (
    TRAINING,
    Failure,
    Header,
    Record,
    RecordFile,
    read_failures,
    read_measured,
    read_record,
    write_failure,
    write_measured,
    write_record,
)
from conformance.run.torch_support import require_features

KEPT = 16
"""Records that a process holds in memory: those of the cells at hand, and what many cells are compared with. The others
are read again when a law needs them, so that memory does not grow with the number of cases."""

# What a rank, or a library in it, says of a disk: no fault of the product.
_STORAGE_FAULT = re.compile("No space left on device|Disk quota exceeded|Read-only file system")


class Unwritable(RuntimeError):
    """The records of a session cannot be written."""


class CellFailed(Exception):
    """A cell's run did not finish. Unless a rank died, every law on that cell gets the same verdict."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.reason}\n{failure.details}")
        self.failure = failure


@dataclass
class Clock:
    """Where the time of one case went."""

    wait_s: float = 0.0
    """Waiting for another worker that was running the same cell, and for devices or processors."""
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
    pools: RunsTasks = field(default_factory=Pools)
    clock: Clock = field(default_factory=Clock)
    shares_ranks: bool = False
    """With stores that have other defects: only where traces of these in a process are harmless."""
    replay: bool = False
    """Nothing is run: all that laws ask for must be there."""
    hardware: Hardware = NO_DEVICES
    accepts: tuple[Substrate, ...] = REAL
    """What the law that is judged holds on."""

    def __post_init__(self) -> None:
        self._kept_record = lru_cache(maxsize=KEPT)(self._record)
        self._kept_measurement = lru_cache(maxsize=KEPT)(self._measurement)

    def run(self, cell: Cell, *, repeat: int = 0) -> Record:
        """The record of a cell, from this session's store or from a run now; `repeat` asks for a further run of it.

        Raises CellFailed.
        """
        return self._kept_record(cell, repeat, self.substrate(cell))

    def measure(self, task: str, cell: Cell, *, alone: bool = False, on_device: bool = False) -> list[Any]:
        """What a task, such as `build:probe`, measures on each rank of a cell's world, or in one process `alone`:
        on the CPU, or where ranks of the cell's world are.

        Measured at most once per session, as a run is. Raises CellFailed.
        """
        substrate = "simulated" if alone and not on_device else self.substrate(cell)
        return self._kept_measurement(task, cell, alone, substrate)

    def substrate(self, cell: Cell) -> Substrate:
        """Where ranks of a cell are run. Raises ValueError if the law at hand holds nowhere here."""
        real = tuple(one for one in self.accepts if one != "simulated") or REAL
        found = self.hardware.substrate(cell.world_size, real)
        if found is None:
            raise ValueError(f"{cell.world_size} ranks on {' or '.join(real)}: not on this machine")
        return found

    def probe(self, world_size: int) -> list[dict[str, Any]]:
        """Facts of all ranks of a world about their surroundings. Raises CellFailed."""
        return self.measure("build:probe", Cell(mesh=f"dp{world_size}"))

    def _record(self, cell: Cell, repeat: int, substrate: Substrate) -> Record:
        self._require_features(TRAINING, cell, substrate)
        directory, header = self._place(cell, substrate=self.substrate(cell), repeat=repeat)
        return Record(directory, self._once(directory, lambda: self._train(header, directory)))

    def _measurement(self, task: str, cell: Cell, alone: bool, substrate: Substrate) -> list[Any]:
        self._require_features(task, cell, substrate)
        directory, header = self._place(cell, substrate=substrate, task=task, alone=alone)
        self._once(directory, lambda: self._measure(header, directory))
        return read_measured(directory)

    def _place(self, cell: Cell, **what: Any) -> tuple[Path, Header]:
        header = Header(cell=cell, session=self.session, torch=self.torch_version, defect=self.defect, **what)
        return self.directory / f"{cell.id}--{_digest(header)}", header

    def _require_features(self, task: str, cell: Cell, substrate: Substrate) -> None:
        """Raises Unsupported for what this torch lacks."""
        for one in (cell, cell.saver) if cell.steps_before_save else (cell,):
            require_features(task, one, device=device_type(substrate), torch_version=self.torch_version)

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
        """What is in a directory, or comes there now. Raises CellFailed if it is a failure, or Unwritable."""
        if self.replay:
            return _replayed(directory)
        try:
            return self._locked(directory, execute)
        except OSError as error:
            raise Unwritable(f"no record can be written to {self.directory}: {error.strerror or error}") from error

    def _locked(self, directory: Path, execute: Callable[[], RecordFile]) -> RecordFile:
        directory.mkdir(parents=True, exist_ok=True)
        start_s = time.monotonic()
        # A run cannot outlast its lease and its deadline by much, so neither can the wait for one.
        with FileLock(directory / "lock", timeout=4 * self.deadline_s + LEASE_LIMIT_S):
            self.clock.wait_s += time.monotonic() - start_s
            content = read_record(directory)
            if content is None:
                content = self._executed(directory, execute)
        return _finished(content)

    def _executed(self, directory: Path, execute: Callable[[], RecordFile]) -> RecordFile:
        start_s, waited_before_s, trained_before_s = time.monotonic(), self.pools.waited_s, self.pools.trained_s
        try:
            content = execute()
        except CellFailed as failed:
            write_failure(directory, failed.failure)
            raise
        finally:
            waited_s = self.pools.waited_s - waited_before_s
            run_s = time.monotonic() - start_s - waited_s
            self.clock.wait_s += waited_s
            self.clock.run_s += run_s
        if content.failure is not None and content.failure.kind == "crash":
            # A death belongs to the case that saw it, and may have come from outside (the OOM killer): the cell's other
            # laws get a run of their own. Hangs are kept, or each law would wait for the deadline.
            write_failure(directory, content.failure)
        else:
            train_s = round(self.pools.trained_s - trained_before_s, 4)
            write_record(directory, msgspec.structs.replace(content, run_s=round(run_s, 4), train_s=train_s))
        return content

    def _train(self, header: Header, directory: Path) -> RecordFile:
        left_s = self._left_s()
        try:
            if header.cell.steps_before_save:
                left_s -= self._save(header, directory, deadline_s=left_s)
            results = self._on_ranks(header, directory, deadline_s=max(1.0, left_s))
        except RunFailed as failed:
            return RecordFile(header=header, failure=to_failure(failed))
        silent = next((rank for rank, result in enumerate(results) if "missing" in result), None)
        if silent is not None:
            return RecordFile(header=header, failure=_incomplete(silent, results[silent]["missing"]))
        facts = msgspec.Raw(msgspec.json.encode([result["facts"] for result in results]))
        return RecordFile(header=header, ranks=facts)

    def _measure(self, header: Header, directory: Path) -> RecordFile:
        left_s = self._left_s()
        with tempfile.TemporaryDirectory() as scratch:
            try:
                write_measured(directory, self._on_ranks(header, Path(scratch), kept=directory, deadline_s=left_s))
            except RunFailed as failed:
                return RecordFile(header=header, failure=to_failure(failed))
        return RecordFile(header=header)

    def _on_ranks(self, header: Header, directory: Path, *, deadline_s: float, kept: Path | None = None) -> list[Any]:
        """`directory` is the tasks' for files; what must outlast a measurement goes to `kept`."""
        cell, kind = header.cell, self._kind(header.cell)
        task = Task(
            f"conformance.experiments.{header.task}",
            task_payload(cell, directory, defect=self.defect) | {"kept": str(kept or directory)},
            kind=f"{kind} alone" if header.alone else kind,
            accelerated=device_type(header.substrate) == "cuda",
        )
        world_size = 1 if header.alone else cell.world_size
        return self.pools.run(task, world_size=world_size, deadline_s=deadline_s, env=self._environment(header))

    def _environment(self, header: Header) -> dict[str, str]:
        return {**self.hardware.environment(header.substrate), **header.cell.environment}

    def _save(self, header: Header, directory: Path, *, deadline_s: float) -> float:
        """Run what a resumed cell goes on from, in processes that are not used for what follows; returns its time."""
        start_s, waited_before_s = time.monotonic(), self.pools.waited_s
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)  # of an earlier run that died
        saver = header.cell.saver
        substrate = self.substrate(saver)
        task = Task(
            "conformance.experiments.training:train_and_save",
            task_payload(saver, directory, defect=self.defect),
            kind=f"{self._kind(saver)} saves",
            accelerated=device_type(substrate) == "cuda",
        )
        environment = self.hardware.environment(substrate)
        self.pools.run(task, world_size=saver.world_size, deadline_s=deadline_s, env=environment)
        return time.monotonic() - start_s - (self.pools.waited_s - waited_before_s)

    def _kind(self, cell: Cell) -> str:
        """Which tasks may share processes.

        DTensor keeps sharding decisions with the mesh they were made for, and finds them again for any mesh that
        compares equal: the tp rows of dp4-tp2 and of hsdp2x2-tp2 do, but their process groups have other names
        ("Could not resolve the process group registered under the name 9", torch 2.13). No public way to clear it.
        """
        kind = f"{cell.mesh} {_confused_with(cell)}" if self._confuses_models else cell.mesh
        return kind if self.shares_ranks else f"{kind} {self.defect or ''}"

    @property
    def _confuses_models(self) -> bool:
        """Whether DTensor may take one embedding for another that the process has had before, as up to torch 2.10.

        Of another vocabulary: "EmbeddingBackward0 returned an invalid gradient" (fixed by
        https://github.com/pytorch/pytorch/pull/174727). Sharded in another dtype: "assert self.mask_buffer.data is not
        None" (https://github.com/pytorch/torchchat/issues/1086; the mask's equality is changed by
        https://github.com/pytorch/pytorch/pull/169748). A trainer, which has one model, never sees it. 2.13 has both
        changes; 2.11 and 2.12 were not looked at, and are taken to have neither, which costs only time.
        """
        return release(self.torch_version) <= (2, 12)


def _confused_with(cell: Cell) -> str:
    """What cells that share ranks have in common where DTensor confuses others: model, and dtype of what is sharded."""
    return f"{cell.model} {'bf16' if cell.precision in ('bf16-init', 'bf16-mixed') else 'fp32'}"


def _replayed(directory: Path) -> RecordFile:
    """Raises CellFailed as the session did, ValueError if the session has left nothing there."""
    content, failures = read_record(directory), read_failures(directory)
    if content is None and failures:
        raise CellFailed(failures[-1])
    if content is None:
        raise ValueError(f"no record {directory.name}: the laws of this version ask for a run that was not made")
    return _finished(content)


def _incomplete(rank: int, missing: list[str]) -> Failure:
    reason = f"rank {rank} finished without {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
    return Failure(kind="raised", first_rank=rank, reason=reason, details="\n".join(missing))


def _finished(content: RecordFile) -> RecordFile:
    if content.failure is not None:
        raise CellFailed(content.failure)
    return content


def task_payload(cell: Cell, directory: Path, *, defect: str | None) -> dict[str, Any]:
    """What the tasks of `experiments` are given."""
    from conformance.plan.workload import trainer_config  # imports torch, which is not needed to find records

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
    """Keep what a report needs; an exception of the suite's own code, or of a full disk, is the suite's error."""
    first = next(report for report in failed.ranks if report.rank == failed.first_rank)
    from_suite = failed.kind == "raised" and (
        Path(first.innermost_file).is_relative_to(PACKAGE) or _STORAGE_FAULT.search(first.message) is not None
    )
    kind = "suite-error" if from_suite else failed.kind
    return Failure(kind=kind, first_rank=failed.first_rank, reason=failed.reason, details=failed.details())


def _digest(header: Header) -> str:
    return hashlib.sha256(msgspec.json.encode(header)).hexdigest()[:12]
