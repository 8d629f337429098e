"""Runs of a subject on warm ranks: the reference in one process, and cells on all their ranks."""

import re
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from conformance.outcomes import CellFailed, Failure
from conformance.project import PACKAGE
from conformance.run.case_runs import to_failure
from conformance.run.failures import RunFailed
from conformance.run.pool import RunsTasks, Task
from conformance.run.ranks.messages import RankReport
from conformance.run.torch_support import confuses_embeddings
from conformance.subjects.cells import CELLS, SubjectCell, Workload
from conformance.subjects.evidence import Evidence, Reference, SubjectRecord
from conformance.subjects.facts import Description, ReferenceFacts, ReferenceJob, SubjectFacts, TrainJob
from conformance.subjects.protocol import SubjectMistake
from conformance.subjects.tasks import REFERENCE_FILE, WEIGHTS_FILE

LIMIT_S = 60.0
"""Default limit of one run."""
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


@dataclass
class SubjectRuns:
    """Runs of one subject, whose files are in a directory of the caller."""

    name: str
    pools: RunsTasks
    directory: Path
    limit_s: float = LIMIT_S
    torch_version: str = field(default_factory=partial(version, "torch"))
    _references: dict[Workload, Reference] = field(default_factory=dict)
    _count: int = 0

    @cached_property
    def description(self) -> Description:
        """Subject as its author describes it; raises SubjectMistake if it cannot be loaded."""
        return msgspec.convert(self._alone("describe", {"subject": self.name}), Description)

    def reference(self, workload: Workload) -> Reference:
        """Return the reference for a division of the data, which is run once; raises SubjectMistake if it fails."""
        if workload not in self._references:
            directory = self._new_directory()
            bf16 = any(
                cell.precision == "bf16" and cell.workload == workload and cell.id not in self.description.unsupported
                for cell in CELLS
            )
            job = ReferenceJob(subject=self.name, workload=workload, bf16=bf16, directory=str(directory))
            facts = msgspec.convert(self._alone("train_reference", _payload(job)), ReferenceFacts)
            self._references[workload] = Reference(directory, REFERENCE_FILE, facts)
        return self._references[workload]

    def run(self, cell: SubjectCell, *, fault: str | None = None) -> Evidence:
        """Run a cell on its ranks; raises CellFailed if a rank does not finish."""
        reference, directory = self.reference(cell.workload), self._new_directory()
        job = TrainJob(
            subject=self.name,
            cell=cell,
            max_norm=reference.facts.max_norm,
            names=reference.facts.parameters,
            aliases=reference.facts.aliases,
            weights=str(reference.directory / WEIGHTS_FILE),
            directory=str(directory),
            fault=fault,
        )
        task = Task(f"{_TASKS}:train_subject", _payload(job), kind=self._kind(cell))
        try:
            results = self.pools.run(task, world_size=cell.world_size, deadline_s=self.limit_s, env=_UNDER_TORCHRUN)
        except RunFailed as failed:
            raise CellFailed(_failure(failed)) from failed
        facts = [msgspec.convert(result, SubjectFacts) for result in results]
        return Evidence(SubjectRecord(directory, cell, facts), reference)

    def _kind(self, cell: SubjectCell) -> str:
        """Return the kind of a cell's task; see `kind_of_processes` for what must not share processes."""
        kind = f"{self.name} {cell.mesh}"
        return f"{kind} {cell.precision}" if confuses_embeddings(self.torch_version) else kind

    def _alone(self, function: str, payload: dict[str, Any]) -> Any:
        task = Task(f"{_TASKS}:{function}", payload, kind=self.name)
        try:
            (result,) = self.pools.run(task, world_size=1, deadline_s=self.limit_s)
        except RunFailed as failed:
            raise SubjectMistake(_reason(failed)) from failed
        return result

    def _new_directory(self) -> Path:
        self._count += 1
        directory = self.directory / f"run{self._count}"
        directory.mkdir()
        return directory


def _payload(job: ReferenceJob | TrainJob) -> dict[str, Any]:
    """Return a job in the types that a task's payload may have: lists in place of tuples.

    JSON would turn NaN and infinity, which a norm may be, into null.
    """
    payload: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(job))
    return payload


def _failure(failed: RunFailed) -> Failure:
    """Return the failure of a cell; what the author of the subject has to mend is no error of the suite."""
    failure = to_failure(failed)
    is_mistake = _first(failed).exception_type == _MISTAKE
    kind = "raised" if is_mistake else failure.kind
    return msgspec.structs.replace(failure, kind=kind, reason=_reason(failed))


def _reason(failed: RunFailed) -> str:
    """Return one line about the rank that failed first, with the place in the author's code."""
    report = _first(failed)
    if report.exception_type == _MISTAKE:
        return report.message
    return failed.reason + _place(report)


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
