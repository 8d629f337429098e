"""Runs of a subject for one case: its reference in one process, and cells on all their ranks."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from conformance.outcomes import CellFailed, Failure, Unsupported
from conformance.plan.cells import Cell
from conformance.plan.matrix import TRAINER_CELLS
from conformance.plan.substrates import REAL, Substrate
from conformance.run import known_trainers
from conformance.run.case_runs import to_failure
from conformance.run.devices.hardware import device_type
from conformance.run.experiment import Processes
from conformance.run.failures import RunFailed
from conformance.run.pool import Task, Template
from conformance.run.ranks.messages import RankReport
from conformance.run.record import Header, RecordFile, read_failures, read_record, read_results, write_results
from conformance.run.store import Clock, RecordStore
from conformance.run.torch_support import confuses_embeddings
from conformance.subjects.cells import DeviceType, SubjectCell, reference_cell, subject_cell
from conformance.subjects.crashes import last_collectives, owners_place, owners_traceback
from conformance.subjects.evidence import Evidence, Reference, SubjectRecord
from conformance.subjects.facts import (
    DescribeJob,
    Description,
    ReferenceFacts,
    ReferenceJob,
    StepsJob,
    SubjectFacts,
    TrainJob,
)
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
_ONE_DEVICE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""Variables of torchrun for a rank to which CUDA shows its own device alone: as if each rank had its own host."""
_ALONE: Mapping[DeviceType, Substrate] = {"cpu": "gloo", "sim": "sim", "cuda": "nccl"}
"""Substrate of one process, by the type of its device."""
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

    def __init__(self, store: RecordStore, *, law: str = "") -> None:
        """`law` is the id of the law that is judged: of all laws of a cell one tells that its run did not finish."""
        if store.subject is None:
            raise ValueError("the record store names no subject")
        self.store, self.subject, self._law = store, _target(store.subject), law
        self.clock = Clock()

    def fixtures(self, cell: Cell) -> Mapping[str, Any]:
        """Return the arguments that a law's test may have, by name, see `conformance.subjects.evidence`."""
        with self._told_once(cell):
            evidence = self.evidence(cell)
        return {"cell": cell, "evidence": evidence, "under": partial(self._told_under, cell)}

    def description(self) -> Description:
        """Return the packages of the subject; raises CellFailed if it cannot be loaded."""
        return self._description(TRAINER_CELLS, Cell())

    @cached_property
    def _described(self) -> Description:
        return self.description()

    def _description(self, cells: Sequence[Cell], key: Cell) -> Description:
        """Return the packages of the subject, and the cells of these that it refuses."""
        devices = {cell.id: self._device(cell) for cell in cells}
        directory = self._alone("describe", key, _payload(DescribeJob(subject=self.subject, devices=devices)))
        return _first_result(directory, Description)

    def _refusal(self, cell: Cell) -> str | None:
        """Return why the subject refuses a cell, or None."""
        described = self._described if cell in TRAINER_CELLS else self._description([cell], cell)
        return described.refused.get(cell.id)

    def reference(self, cell: Cell) -> Reference:
        """Return the reference with which a cell is compared, which ranks without a defect have made."""
        base = reference_cell(cell)
        job = ReferenceJob(
            subject=self.subject,
            workload=self._options(cell).workload,
            in_bf16=base.precision != "fp32",
            directory="",
        )
        directory = self._alone("train_reference", base, _payload(job), of=cell)
        return _reference(directory)

    def under(self, cell: Cell, schedule: str, *, is_repeated: bool = False) -> SubjectRecord:
        """Return the record of a cell under a schedule of the simulated accelerator; see `TrainJob.is_repeated`.

        Other devices have no schedules. Raises as `evidence` does.
        """
        return self._trained(
            cell,
            self.reference(cell),
            schedule=schedule if self._device(cell) == "sim" else "",
            is_repeated=is_repeated,
        )

    def _told_under(self, cell: Cell, schedule: str, *, is_repeated: bool = False) -> SubjectRecord:
        with self._told_once(cell, f"{schedule}{' repeated' * is_repeated}"):
            return self.under(cell, schedule, is_repeated=is_repeated)

    @contextmanager
    def _told_once(self, cell: Cell, schedule: str = "") -> Iterator[None]:
        """Open a context in which a run is made; raises CellFailed for one law, if it fails, Unsupported for others.

        An exception on a rank, which no other law would see otherwise, is a crash.
        """
        told = self.store.directory / f"failed-{self.store.session}" / _file_name(cell.id, schedule, self.store.defect)
        if self._law and told.exists() and told.read_text().partition("\n")[0] != self._law:
            raise Unsupported(f"did not run: {told.read_text().partition(chr(10))[2]}")
        try:
            yield
        except CellFailed as failed:
            failure = failed.failure
            if self._law and not self.store.replay:
                told.parent.mkdir(exist_ok=True)
                told.write_text(f"{self._law}\n{failure.reason}")
            kind = "crash" if failure.kind == "raised" else failure.kind
            raise CellFailed(msgspec.structs.replace(failure, kind=kind)) from None

    def evidence(self, cell: Cell, *, tapped: bool = False) -> Evidence:
        """Return the record of a cell with its reference; of a `tapped` run with taps in its directory.

        Raises CellFailed if a rank does not finish. Raises Unsupported for a cell that the subject refuses, and after
        another cell has hung: each of the others would probably take all of its time, too.
        """
        reason = self._refusal(cell)
        if reason is not None:
            raise Unsupported(reason)
        reference = self.reference(cell)
        if cell.batches == "uneven" and not reference.facts.varies:
            raise Unsupported("count() is the same for all batches")
        return Evidence(self._trained(cell, reference, tapped=tapped), reference)

    def _trained(
        self,
        cell: Cell,
        reference: Reference,
        *,
        tapped: bool = False,
        schedule: str = "",
        is_repeated: bool = False,
        seed: int = 0,
    ) -> SubjectRecord:
        task = "train_tapped_subject" if tapped else "train_subject"
        run = " ".join(filter(None, (task, schedule, "repeated" * is_repeated, f"seed {seed}" * bool(seed))))
        header = self._header(run, cell, substrate=self._substrate(cell.world_size), defect=self.store.defect)
        self._require_nothing_hung(header)
        job = TrainJob(
            subject=self.subject,
            cell=self._options(cell),
            max_norm=reference.facts.max_norm,
            names=reference.facts.parameters,
            aliases=reference.facts.aliases,
            weights=str(reference.directory / WEIGHTS_FILE),
            kept_in_fp32=reference.facts.kept_in_fp32,
            directory="",
            defect=self.store.defect,
            schedule=schedule,
            is_repeated=is_repeated,
            seed=seed,
        )
        directory = self._run(header, _payload(job), world_size=cell.world_size, kind=self._kind(cell))
        return _record(directory, cell, self._options(cell))

    def expected_steps(self, cell: Cell, *, weights: Path, record: Path) -> Path:
        """Return the directory with each step of a tapped run as one process computes it, see `expectation`.

        `weights` is a file with the full weights with which each step of the run began, `record` its directory.
        """
        return self._from_steps("compute_steps", cell, weights, record)

    def terms(self, cell: Cell, *, weights: Path, record: Path) -> Path:
        """Return the directory with the gradients of each micro-batch in one process, see `formulas`.

        `weights` and `record` are those of `expected_steps`; taps are not needed.
        """
        return self._from_steps("compute_terms", cell, weights, record)

    def _from_steps(self, function: str, cell: Cell, weights: Path, record: Path) -> Path:
        job = StepsJob(
            subject=self.subject, cell=self._options(cell), weights=str(weights), record=str(record), directory=""
        )
        return self._alone(function, cell, _payload(job), defect=self.store.defect)

    def with_another_seed(self, cell: Cell) -> SubjectRecord:
        """Return the record of a cell whose ranks draw other random numbers than in `evidence`; raises as it does."""
        return self._trained(cell, self.reference(cell), seed=1)

    def kept_failure(self, cell: Cell) -> Failure | None:
        """Return the failure of a cell's run in this session; None if there was no run, or if it finished."""
        substrate = self._substrate(cell.world_size)
        header = self._header("train_subject", cell, substrate=substrate, defect=self.store.defect)
        directory = self.store.directory_of(header)
        record = read_record(directory)
        return record.failure if record else next(reversed(read_failures(directory)), None)

    def _options(self, cell: Cell) -> SubjectCell:
        return subject_cell(
            cell,
            device=self._device(cell),
            accumulation=self._described.accumulation,
            turns=self._described.turns,
        )

    def _substrate(self, world_size: int) -> Substrate:
        """Return the substrate on which a world runs."""
        simulated = self.store.hardware.simulated
        if simulated is not None and simulated.lacks:
            return "gloo"
        substrate = self.store.hardware.substrate(world_size, REAL)
        assert substrate is not None, "gloo is everywhere"
        return substrate

    def _device(self, cell: Cell) -> DeviceType:
        """Return the type of the device on which the ranks of a cell compute."""
        return device_type(self._substrate(cell.world_size))

    def _alone(
        self,
        function: str,
        cell: Cell,
        payload: Mapping[str, Any],
        *,
        defect: str | None = None,
        of: Cell | None = None,
    ) -> Path:
        """Return the directory of one process, which computes on the type of device that a cell has.

        The cell is `of`, or else the one that names the run.
        """
        device = self._device(of or cell)
        header = self._header(function, cell, substrate=_ALONE[device], defect=defect, processes="one")
        return self._run(header, payload, world_size=1, kind=self.subject)

    def _header(
        self, function: str, cell: Cell, *, substrate: Substrate, defect: str | None, processes: Processes = "ranks"
    ) -> Header:
        return Header(
            cell=cell,
            session=self.store.session,
            torch=self.store.torch_version,
            substrate=substrate,
            defect=defect,
            experiment=f"{_TASKS}:{function}",
            processes=processes,
            trainer=self.subject,
        )

    def _run(self, header: Header, payload: Mapping[str, Any], *, world_size: int, kind: str) -> Path:
        """Return the directory of a run, in which its ranks leave their files; raises CellFailed if one fails."""

        def execute(directory: Path) -> RecordFile:
            task = Task(
                header.experiment.partition(" ")[0],
                {**payload, "directory": str(directory)},
                kind=kind,
                accelerated=device_type(header.substrate) == "cuda",
                template=None if header.processes == "one" else self._template(header.substrate),
            )
            try:
                results = self._results(task, header, world_size=world_size)
            except RunFailed as failed:
                failure = _failure(failed, directory, remedy=_NAMED_DEVICE_REMEDY if header.substrate == "sim" else "")
                if failure.kind == "timeout" and header.defect is None:
                    self._hung.parent.mkdir(exist_ok=True)
                    self._hung.write_text(header.cell.id)
                return RecordFile(header=header, failure=failure)
            with self.store.writing():
                write_results(directory, results)
            return RecordFile(header=header)

        return self.store.run(header, execute, self.clock)

    def prepare(self) -> None:
        """Start the process of which ranks are forks, which loads the subject while this one does something else."""
        template = self._template(self._substrate(1))
        if template is not None:
            self.store.pools.prepare(template)

    def _template(self, substrate: Substrate) -> Template | None:
        """Return the process that loads the subject once, of which ranks on processors are forks, if they can be."""
        if device_type(substrate) != "cpu" or not self._described.loads_alike:
            return None
        return Template(
            f"{_TASKS}:load", self.subject, {**self.store.hardware.environment(substrate), **_UNDER_TORCHRUN}
        )

    def _results(self, task: Task, header: Header, *, world_size: int) -> list[Any]:
        """Return the results of a task's ranks; a trainer that raises in used processes is tried in fresh ones."""
        environment = {**self.store.hardware.environment(header.substrate), **_UNDER_TORCHRUN}
        environment |= _ONE_DEVICE if task.accelerated else {}

        def run(task: Task) -> list[Any]:
            left_s = self.store.left_s(self.clock)
            return self.store.pools.run(task, world_size=world_size, deadline_s=left_s, env=environment)

        if header.processes == "one":
            return run(task)
        fresh = msgspec.structs.replace(task, kind=f"{task.kind} {self.store.directory_of(header).name}")
        if self._described.needs_fresh_processes or self.fresh_processes.is_needed:
            return run(fresh)
        try:
            results = run(task)
        except RunFailed as failed:
            is_mistake = failed.kind != "raised" or _first(failed).exception_type == _MISTAKE
            if is_mistake or header.defect is not None or not self.fresh_processes.may_help:
                raise
            self.fresh_processes.tried(header.cell.id)
            results = run(fresh)
            self.fresh_processes.helped(header.cell.id)
        self.fresh_processes.served()
        return results

    @property
    def fresh_processes(self) -> "FreshProcesses":
        """Notes of the session about processes that serve one run alone."""
        return FreshProcesses(self.store.directory / f"processes-{self.store.session}")

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


@dataclass(frozen=True)
class FreshProcesses:
    """Notes of a session, which its workers share, about whether a trainer needs processes that nothing has used.

    A trainer that leaves globals behind, such as process groups, passes its first run in a process and raises in the
    next one. It is tried once more in fresh processes, and if that helps all its later runs get such.
    """

    directory: Path

    @property
    def is_needed(self) -> bool:
        """True if a run has raised in used processes, and not in fresh ones."""
        return self._file("helped").exists()

    @property
    def may_help(self) -> bool:
        """True if processes have served a run before, and fresh ones were not tried in vain."""
        return self._file("served").exists() and not self._file("tried").exists()

    @property
    def cell(self) -> str:
        """Id of the cell that raised in used processes alone; empty if there is none."""
        return self._file("helped").read_text() if self.is_needed else ""

    def served(self) -> None:
        """Note that processes have served a run."""
        self._note("served", "")

    def tried(self, cell: str) -> None:
        """Note that a cell is tried in fresh processes."""
        self._note("tried", cell)

    def helped(self, cell: str) -> None:
        """Note that a cell has passed in fresh processes."""
        self._note("helped", cell)

    def _note(self, name: str, text: str) -> None:
        if not self._file(name).exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            self._file(name).write_text(text)

    def _file(self, name: str) -> Path:
        return self.directory / name


@lru_cache(maxsize=4)
def _reference(directory: Path) -> Reference:
    return Reference(directory, REFERENCE_FILE, _first_result(directory, ReferenceFacts))


@lru_cache(maxsize=16)
def _record(directory: Path, cell: Cell, options: SubjectCell) -> SubjectRecord:
    facts = [msgspec.convert(result, SubjectFacts) for result in read_results(directory)]
    return SubjectRecord(directory, cell, options, facts)


def _first_result(directory: Path, type_: type[_Result]) -> _Result:
    return msgspec.convert(read_results(directory)[0], type_)


def _payload(job: DescribeJob | ReferenceJob | StepsJob | TrainJob) -> dict[str, Any]:
    """Return a job in the types that a task's payload may have: lists in place of tuples.

    JSON would turn NaN and infinity, which a norm may be, into null.
    """
    payload: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(job))
    return payload


def _failure(failed: RunFailed, directory: Path, *, remedy: str) -> Failure:
    """Return the failure of a run in a directory; a mistake that the subject's author has to correct is no suite's.

    `remedy` is for code that names a device.
    """
    failure, first = to_failure(failed), _first(failed)
    is_mistake = first.exception_type == _MISTAKE
    return msgspec.structs.replace(
        failure,
        kind="raised" if is_mistake else failure.kind,
        reason=_reason(failed, remedy),
        traceback="" if is_mistake else owners_traceback(first),
        collectives=last_collectives(directory, world_size=len(failed.ranks)),
    )


def _reason(failed: RunFailed, remedy: str) -> str:
    """Return one line about the rank that failed first, with the place in the author's code."""
    report = _first(failed)
    if report.exception_type == _MISTAKE:
        return report.message
    place = owners_place(report) if failed.kind != "timeout" else ""
    return failed.reason + (f" ({place})" if place else "") + (remedy if _NAMED_DEVICE.search(report.message) else "")


def _first(failed: RunFailed) -> RankReport:
    return next(report for report in failed.ranks if report.rank == failed.first_rank)


def _file_name(*words: str | None) -> str:
    """Return a file name of words that name a run."""
    return re.sub(r"[^\w.+-]+", "_", " ".join(filter(None, words)))
