"""Runs of cells, and experiments on them, for one case, with its clock and deadline."""

import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from conformance.outcomes import Failure, Unsupported
from conformance.plan.cells import Cell
from conformance.plan.substrates import REAL, Substrate
from conformance.project import PACKAGE
from conformance.run.devices.hardware import device_type
from conformance.run.experiment import (
    CALIBRATION,
    SAVING,
    TAPPED,
    TRAINING,
    Experiment,
    Needs,
    Result,
    job_of,
    json_like,
    number_of_processes,
)
from conformance.run.failures import RunFailed
from conformance.run.ranks.messages import Task
from conformance.run.record import Header, Record, RecordFile, read_record, write_results
from conformance.run.store import Clock, RecordStore
from conformance.run.torch_support import kind_of_processes, require_features
from conformance.torch_coverage.seen import VARIABLE as COVERAGE_VARIABLE

# Error messages of ranks, and of libraries in them, about a disk: no fault of the product.
_STORAGE_FAULT = re.compile("No space left on device|Disk quota exceeded|Read-only file system")


class CaseRuns:
    """Runs for the law of one case, on the substrates on which the law holds."""

    def __init__(self, store: RecordStore, accepts: tuple[Substrate, ...] = REAL) -> None:
        self.store = store
        self.clock = Clock()
        self.records: set[str] = set()
        """Names of the records that the law has asked for."""
        self.is_share = False
        """True if the law has asked for a sweep that has tried a share of its samples alone."""
        self._real = tuple(substrate for substrate in accepts if substrate != "simulated") or REAL

    def fixtures(self, cell: Cell) -> Mapping[str, Any]:
        """Return the arguments that a law's test may have, by name, see `conformance.assertions.fixtures`."""
        return {"cell": cell, "run": self.run, "measure": self.measure}

    def run(self, cell: Cell, *, repeat: int = 0, tapped: bool = False) -> Record:
        """Return the record of a cell, from this session's store or from a run now.

        `repeat` > 0 asks for a further run of the same cell, `tapped` for one with taps. Raises CellFailed if a run
        does not finish, Unsupported if this torch lacks an ability that the run needs, or this machine the devices.
        """
        substrate = self._substrate(cell)
        self._require_features(Needs.TRAINING, cell, substrate)
        header = self._header(cell, substrate, repeat=repeat, experiment=TAPPED if tapped else TRAINING)
        self.records.add(self.store.directory_of(header).name)
        return self.store.record(header, lambda directory: self._train(header, directory), self.clock)

    def tapped_directory(self, cell: Cell) -> Path:
        """Return the directory in which ranks with taps leave these, also when the run of a cell fails."""
        return self.store.directory_of(self._header(cell, self._substrate(cell), experiment=TAPPED))

    def kept_failure(self, cell: Cell) -> Failure | None:
        """Return the failure of a cell's run in this session; None if there was no run, or if it finished."""
        record = read_record(self.store.directory_of(self._header(cell, self._substrate(cell))))
        return record.failure if record else None

    def measure(self, experiment: Experiment[Result], cell: Cell, *, on_device: bool = False) -> list[Result]:
        """Return the results of an experiment, by rank of a cell's world or from a single process.

        An experiment of a single process runs on the CPU, or with `on_device` on the device of the cell's ranks. An
        experiment runs at most once per session for each cell. Raises as `run` does.
        """
        simulated = experiment.processes == "sampled" or (experiment.processes != "ranks" and not on_device)
        substrate: Substrate = "simulated" if simulated else self._substrate(cell)
        self._require_features(experiment.needs, cell, substrate)
        sweep_share = self.store.sweep_share if experiment.takes_share else 1.0
        self.is_share |= sweep_share < 1.0
        header = self._header(
            cell,
            substrate,
            experiment=experiment.name,
            processes=experiment.processes,
            sweep_share=sweep_share,
        )
        self.records.add(self.store.directory_of(header).name)
        results = self.store.results(header, lambda directory: self._measure(header, directory), self.clock)
        return [msgspec.convert(result, experiment.result) for result in results]

    def calibration_s(self) -> float:
        """Return the time that two ranks take for a fixed piece of work, which leaves no record.

        Raises Unsupported or RunFailed as runs do, PoolError if no rank can be started.
        """
        cell = Cell(mesh="dp2")  # whose ranks most cells can use afterwards
        header = self._header(cell, self._substrate(cell), experiment=CALIBRATION)
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch)
            return max(map(float, self._on_ranks(header, directory, kept=directory, deadline_s=self.store.deadline_s)))

    def _header(self, cell: Cell, substrate: Substrate, **fields: Any) -> Header:
        store = self.store
        return Header(
            cell=cell,
            session=store.session,
            torch=store.torch_version,
            defect=store.defect,
            substrate=substrate,
            **fields,
        )

    def _substrate(self, cell: Cell) -> Substrate:
        """Return the substrate of a cell's ranks; raises Unsupported if none of the law's is on this machine."""
        substrate = self.store.hardware.substrate(cell.world_size, self._real)
        if substrate is None:
            raise Unsupported(f"this machine has no {' or '.join(self._real)} for {_ranks(cell.world_size)}")
        return substrate

    def _require_features(self, needs: Needs, cell: Cell, substrate: Substrate) -> None:
        for trained in (cell, cell.saver) if cell.steps_before_save else (cell,):
            require_features(needs, trained, device=device_type(substrate), torch_version=self.store.torch_version)

    def _train(self, header: Header, directory: Path) -> RecordFile:
        left_s = self.store.left_s(self.clock)
        try:
            if header.cell.steps_before_save:
                left_s -= self._save(header, directory, deadline_s=left_s)
            results = self._on_ranks(header, directory, kept=directory, deadline_s=max(1.0, left_s))
        except RunFailed as failed:
            return RecordFile(header=header, failure=to_failure(failed))
        incomplete = next((rank for rank, result in enumerate(results) if "missing" in result), None)
        if incomplete is not None:
            return RecordFile(header=header, failure=_incomplete(incomplete, results[incomplete]["missing"]))
        facts = msgspec.Raw(msgspec.json.encode([result["facts"] for result in results]))
        return RecordFile(header=header, ranks=facts)

    def _measure(self, header: Header, directory: Path) -> RecordFile:
        left_s = self.store.left_s(self.clock)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                results = self._on_ranks(header, Path(scratch), kept=directory, deadline_s=left_s)
            except RunFailed as failed:
                return RecordFile(header=header, failure=to_failure(failed))
        with self.store.writing():
            write_results(directory, results)
        return RecordFile(header=header)

    def _on_ranks(self, header: Header, directory: Path, *, kept: Path, deadline_s: float) -> list[Any]:
        """Run a header's experiment; `directory` is for temporary files of the ranks, `kept` for files that stay."""
        variant = "" if header.processes == "ranks" else f" {header.processes}"
        task, environment = self._task(
            header.experiment,
            header.cell,
            header.substrate,
            directory,
            kept=kept,
            variant=variant,
            sweep_share=header.sweep_share,
        )
        processes = number_of_processes(header.processes, header.cell.config, header.cell.world_size)
        return self.store.pools.run(task, world_size=processes, deadline_s=deadline_s, env=environment)

    def _save(self, header: Header, directory: Path, *, deadline_s: float) -> float:
        """Run the cell that saves the state to resume, in separate processes; returns the duration in seconds."""
        pools, saver = self.store.pools, header.cell.saver
        start_s, waited_before_s = time.monotonic(), pools.waited_s
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)  # those of an earlier run that died
        task, environment = self._task(
            SAVING, saver, self._substrate(saver), directory, kept=directory, variant=" saves"
        )
        pools.run(task, world_size=saver.world_size, deadline_s=deadline_s, env=environment)
        return time.monotonic() - start_s - (pools.waited_s - waited_before_s)

    def _task(
        self,
        function: str,
        cell: Cell,
        substrate: Substrate,
        directory: Path,
        *,
        kept: Path,
        variant: str,
        sweep_share: float = 1.0,
    ) -> tuple[Task, dict[str, str]]:
        """Return the task of a cell's ranks and their environment; only tasks of one variant share processes."""
        store = self.store
        task = Task(
            function,
            json_like(job_of(cell, directory, kept=kept, defect=store.defect, sweep_share=sweep_share)),
            kind=self._kind(cell) + variant,
            accelerated=device_type(substrate) == "cuda",
            compiles=cell.compile,
        )
        coverage = {COVERAGE_VARIABLE: "1"} if store.covers_torch else {}
        return task, {**store.hardware.environment(substrate), **cell.environment, **coverage}

    def _kind(self, cell: Cell) -> str:
        """Return the kind of a cell's tasks; ranks are shared between defects whose traces are harmless alone."""
        kind = kind_of_processes(cell, torch_version=self.store.torch_version)
        return kind if self.store.shares_ranks else f"{kind} {self.store.defect or ''}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _incomplete(rank: int, missing: list[str]) -> Failure:
    reason = f"rank {rank} finished without {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
    return Failure(kind="raised", first_rank=rank, reason=reason, details="\n".join(missing))


def to_failure(failed: RunFailed) -> Failure:
    """Return a failed run as records and reports hold it.

    An exception raised by the suite's own code, or by a full disk, is the suite's error.
    """
    first = next(report for report in failed.ranks if report.rank == failed.first_rank)
    from_suite = failed.kind == "raised" and (
        Path(first.innermost_file).is_relative_to(PACKAGE) or _STORAGE_FAULT.search(first.message) is not None
    )
    kind = "suite-error" if from_suite else failed.kind
    return Failure(kind=kind, first_rank=failed.first_rank, reason=failed.reason, details=failed.details())
