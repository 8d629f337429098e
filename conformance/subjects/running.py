"""Runs of a subject for one case: its reference in one process, and cells on all their ranks."""

import re
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from conformance.outcomes import Failure, Unsupported
from conformance.plan.cells import Cell
from conformance.project import PACKAGE
from conformance.run import known_trainers
from conformance.run.case_runs import to_failure
from conformance.run.failures import RunFailed
from conformance.run.pool import Task
from conformance.run.ranks.messages import RankReport
from conformance.run.record import Header, RecordFile, read_record, read_results, write_results
from conformance.run.store import Clock, RecordStore
from conformance.run.torch_support import confuses_embeddings
from conformance.subjects.cells import SubjectCell, reference_cell, subject_cell
from conformance.subjects.evidence import Evidence, Reference, SubjectRecord
from conformance.subjects.facts import Description, ReferenceFacts, ReferenceJob, StepsJob, SubjectFacts, TrainJob
from conformance.subjects.protocol import SubjectMistake
from conformance.subjects.tasks import REFERENCE_FILE, WEIGHTS_FILE

_TASKS = "conformance.subjects.tasks"
_UNDER_TORCHRUN = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "conformance",
    "GROUP_RANK": "0",
}
"""Variables by which trainers recognise torchrun. Nobody connects to the address: the process group exists before."""
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+)', re.MULTILINE)
_MISTAKE = SubjectMistake.__name__
_NAMED_DEVICE = re.compile("cuda", re.IGNORECASE)
"""Messages of torch about a device that code has named, and that this machine does not have."""
_NAMED_DEVICE_REMEDY = (
    "; ranks compute on sim: take the device from torch.accelerator.current_accelerator() in place of a name such as "
    "'cuda' or 'cpu'"
)
_Result = TypeVar("_Result")


_target = cache(known_trainers.resolve)


class SubjectRuns:
    """Runs of the store's subject for the law of one case; a run that the session has made already is not repeated."""

    def __init__(self, store: RecordStore) -> None:
        if store.subject is None:
            raise ValueError("the record store names no subject")
        self.store, self.subject = store, _target(store.subject)
        self.clock = Clock()
        simulated = store.hardware.simulated
        self._is_simulated = simulated is not None and not simulated.lacks

    def fixtures(self, cell: Cell) -> Mapping[str, Any]:
        """Return the arguments that a law's test may have, by name, see `conformance.subjects.evidence`."""
        return {"cell": cell, "evidence": self.evidence(cell), "under": partial(self.under, cell)}

    def description(self) -> Description:
        """Return the packages of the subject; raises CellFailed if it cannot be loaded."""
        directory = self._alone("describe", Cell(), {"subject": self.subject})
        return _first_result(directory, Description)

    def reference(self, cell: Cell) -> Reference:
        """Return the reference with which a cell is compared, which ranks without a defect have made."""
        base = reference_cell(cell)
        job = ReferenceJob(subject=self.subject, workload=subject_cell(cell).workload, directory="")
        directory = self._alone("train_reference", base, _payload(job))
        return _reference(directory)

    def under(self, cell: Cell, schedule: str, *, is_repeated: bool = False) -> SubjectRecord:
        """Return the record of a cell under a schedule of the simulated accelerator; see `TrainJob.is_repeated`.

        Other devices have no schedules. Raises as `evidence` does.
        """
        return self._trained(
            cell, self.reference(cell), schedule=schedule if self._is_simulated else "", is_repeated=is_repeated
        )

    def evidence(self, cell: Cell, *, tapped: bool = False) -> Evidence:
        """Return the record of a cell with its reference; of a `tapped` run with taps in its directory.

        Raises CellFailed if a rank does not finish. Raises Unsupported for a cell that the subject refuses, and after
        another cell has hung: each of the others would probably take all of its time, too.
        """
        payload = _payload({"subject": self.subject, "cell": self._options(cell)})
        (reason,) = read_results(self._alone("unsupported", cell, payload))
        if reason is not None:
            raise Unsupported(reason)
        reference = self.reference(cell)
        if cell.batches == "uneven" and not reference.facts.varies:
            raise Unsupported("count() is the same for all batches")
        return Evidence(self._trained(cell, reference, tapped=tapped), reference)

    def _trained(
        self, cell: Cell, reference: Reference, *, tapped: bool = False, schedule: str = "", is_repeated: bool = False
    ) -> SubjectRecord:
        task = "train_tapped_subject" if tapped else "train_subject"
        run = " ".join(filter(None, (task, schedule, "repeated" * is_repeated)))
        header = self._header(run, cell, defect=self.store.defect)
        self._require_nothing_hung(header)
        job = TrainJob(
            subject=self.subject,
            cell=self._options(cell),
            max_norm=reference.facts.max_norm,
            names=reference.facts.parameters,
            aliases=reference.facts.aliases,
            weights=str(reference.directory / WEIGHTS_FILE),
            directory="",
            defect=self.store.defect,
            schedule=schedule,
            is_repeated=is_repeated,
        )
        directory = self._run(header, _payload(job), world_size=cell.world_size, kind=self._kind(cell))
        return _record(directory, cell, self._options(cell))

    def expected_steps(self, cell: Cell, *, weights: Path, record: Path) -> Path:
        """Return the directory with each step of a tapped run as one process computes it, see `expectation`.

        `weights` is a file with the full weights with which each step of the run began, `record` its directory.
        """
        job = StepsJob(
            subject=self.subject, cell=self._options(cell), weights=str(weights), record=str(record), directory=""
        )
        return self._alone("compute_steps", cell, _payload(job), defect=self.store.defect)

    def kept_failure(self, cell: Cell) -> Failure | None:
        """Return the failure of a cell's run in this session; None if there was no run, or if it finished."""
        header = self._header("train_subject", cell, defect=self.store.defect)
        record = read_record(self.store.directory_of(header))
        return record.failure if record else None

    def _options(self, cell: Cell) -> SubjectCell:
        return subject_cell(cell, device="sim" if self._is_simulated else "cpu")

    def _alone(self, function: str, cell: Cell, payload: Mapping[str, Any], *, defect: str | None = None) -> Path:
        header = self._header(function, cell, defect=defect, alone=True)
        return self._run(header, payload, world_size=1, kind=self.subject)

    def _header(self, function: str, cell: Cell, *, defect: str | None, alone: bool = False) -> Header:
        return Header(
            cell=cell,
            session=self.store.session,
            torch=self.store.torch_version,
            substrate="sim" if self._is_simulated else "gloo",
            defect=defect,
            experiment=f"{_TASKS}:{function}",
            alone=alone,
            trainer=self.subject,
        )

    def _run(self, header: Header, payload: Mapping[str, Any], *, world_size: int, kind: str) -> Path:
        """Return the directory of a run, in which its ranks leave their files; raises CellFailed if one fails."""

        def execute(directory: Path) -> RecordFile:
            task = Task(header.experiment.partition(" ")[0], {**payload, "directory": str(directory)}, kind=kind)
            environment = {**self.store.hardware.environment(header.substrate), **_UNDER_TORCHRUN}
            left_s = self.store.left_s(self.clock)
            try:
                results = self.store.pools.run(task, world_size=world_size, deadline_s=left_s, env=environment)
            except RunFailed as failed:
                failure = _failure(failed, remedy=_NAMED_DEVICE_REMEDY if self._is_simulated else "")
                if failure.kind == "timeout" and header.defect is None:
                    self._hung.parent.mkdir(exist_ok=True)
                    self._hung.write_text(header.cell.id)
                return RecordFile(header=header, failure=failure)
            with self.store.writing():
                write_results(directory, results)
            return RecordFile(header=header)

        return self.store.run(header, execute, self.clock)

    @property
    def _hung(self) -> Path:
        """File with the id of the cell that has hung in this session, in a directory as records have."""
        return self.store.directory / f"hung-{self.store.session}" / "cell"

    def _require_nothing_hung(self, header: Header) -> None:
        """Raise Unsupported for a run that is still to be made after a cell has hung; a defect is tried even then."""
        is_new = read_record(self.store.directory_of(header)) is None
        if is_new and header.defect is None and self._hung.exists():
            raise Unsupported(f"not run: cell {self._hung.read_text()} hung")

    def _kind(self, cell: Cell) -> str:
        """Return the kind of a cell's task; see `kind_of_processes` for tasks that must not share processes."""
        precision = cell.precision if confuses_embeddings(self.store.torch_version) else ""
        defect = "" if self.store.shares_ranks else self.store.defect
        return " ".join(filter(None, (self.subject, cell.mesh, precision, defect)))


@lru_cache(maxsize=4)
def _reference(directory: Path) -> Reference:
    return Reference(directory, REFERENCE_FILE, _first_result(directory, ReferenceFacts))


@lru_cache(maxsize=16)
def _record(directory: Path, cell: Cell, options: SubjectCell) -> SubjectRecord:
    facts = [msgspec.convert(result, SubjectFacts) for result in read_results(directory)]
    return SubjectRecord(directory, cell, options, facts)


def _first_result(directory: Path, type_: type[_Result]) -> _Result:
    return msgspec.convert(read_results(directory)[0], type_)


def _payload(job: ReferenceJob | StepsJob | TrainJob | dict[str, object]) -> dict[str, Any]:
    """Return a job in the types that a task's payload may have: lists in place of tuples.

    JSON would turn NaN and infinity, which a norm may be, into null.
    """
    payload: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(job))
    return payload


def _failure(failed: RunFailed, *, remedy: str) -> Failure:
    """Return the failure of a run; a mistake that the author of the subject has to correct is no error of the suite.

    `remedy` is for code that names a device.
    """
    failure = to_failure(failed)
    is_mistake = _first(failed).exception_type == _MISTAKE
    kind = "raised" if is_mistake else failure.kind
    return msgspec.structs.replace(failure, kind=kind, reason=_reason(failed, remedy))


def _reason(failed: RunFailed, remedy: str) -> str:
    """Return one line about the rank that failed first, with the place in the author's code."""
    report = _first(failed)
    if report.exception_type == _MISTAKE:
        return report.message
    return failed.reason + _place(report) + (remedy if _NAMED_DEVICE.search(report.message) else "")


def _first(failed: RunFailed) -> RankReport:
    return next(report for report in failed.ranks if report.rank == failed.first_rank)


def _place(report: RankReport) -> str:
    """Return the innermost place in a traceback that is neither in the suite nor in an installed package."""
    frames = [
        (file, line)
        for file, line in _FRAME.findall(report.traceback)
        if not Path(file).is_relative_to(PACKAGE) and "site-packages" not in file and "/lib/python" not in file
    ]
    return f" ({Path(frames[-1][0]).name}:{frames[-1][1]})" if frames else ""
