"""Records: files that a run leaves on disk, and the class through which laws read them.

Full tensors are assembled from the shards that each rank captured, see `conformance.run.shards`.
"""

import math
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from conformance.instruments.facts import RankFacts
from conformance.outcomes import Failure
from conformance.plan.cells import Cell, compiled_on_device
from conformance.plan.substrates import Substrate
from conformance.run.devices.hardware import device_type, kernel_type
from conformance.run.experiment import TRAINING, Processes
from conformance.run.shards import CapturedShards
from reference_trainer.config import TrainerConfig

RECORD_FILE = "record.json"
RESULTS_FILE = "results.msgpack"
"""Results of an experiment by rank; NaN and infinity are preserved."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a record; equal headers mean interchangeable records."""

    schema: Literal[3] = 3
    cell: Cell
    session: str
    torch: str
    substrate: Substrate
    defect: str | None
    experiment: str = TRAINING
    """`MODULE:FUNCTION` that ran on the ranks."""
    processes: Processes = "ranks"
    """Processes in which the experiment ran."""
    sweep_share: float = 1.0
    """Share of the samples that a sweep has tried, if it draws them."""
    trainer: str | None = None
    """Trainer that ran, as `RecordStore.subject` names it; None for the reference trainer."""
    repeat: int = 0
    """Index of this run among the runs of the cell: 0 for the first."""


class RecordFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of record.json."""

    header: Header
    run_s: float = 0.0
    """Duration of the run, without waiting for other processes."""
    train_s: float = 0.0
    """Share of `run_s` that the slowest rank spent in trainers, in seconds."""
    ranks: msgspec.Raw = msgspec.Raw(b"[]")
    """RankFacts of each rank of a training run, decoded when a law needs the facts."""
    failure: Failure | None = None


class Record(CapturedShards):
    """Finished training run: facts of all ranks, and full tensors assembled from the shards that ranks captured."""

    def __init__(self, directory: Path, content: RecordFile) -> None:
        super().__init__(directory, name=content.header.cell.id, world_size=content.header.cell.world_size)
        self.header = content.header
        self._ranks = content.ranks

    @property
    def cell(self) -> Cell:
        """Cell that was run."""
        return self.header.cell

    @property
    def config(self) -> TrainerConfig:
        """Configuration of the ranks."""
        config = self.cell.config
        return compiled_on_device(config) if self.device_type == "cuda" else config

    @property
    def device_type(self) -> Literal["cpu", "sim", "cuda"]:
        """Type of the device that computed; tensors of the record are on the CPU."""
        return device_type(self.header.substrate)

    @property
    def kernel_type(self) -> Literal["cpu", "cuda"]:
        """Type of the device on which an oracle rounds as the run did."""
        return kernel_type(self.header.substrate)

    @cached_property
    def ranks(self) -> list[RankFacts]:
        """Facts by rank."""
        return msgspec.json.decode(self._ranks, type=list[RankFacts])

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps that were executed: from 0, or from the step after a checkpoint."""
        return [step.step for step in self.ranks[0].steps]

    @property
    def steps_taken(self) -> list[int]:
        """Numbers of the steps that were not skipped because a gradient overflowed."""
        return [step.step for step in self.ranks[0].steps if not step.skipped]

    @property
    def losses(self) -> list[float]:
        """Loss of each step in nats; NaN where the loss was not finite."""
        return [_number(step.loss) for step in self.ranks[0].steps]

    @property
    def grad_norms(self) -> list[float]:
        """Gradient norm of each step before clipping, as the trainer logged it on rank 0."""
        return [_number(step.grad_norm) for step in self.ranks[0].steps]


def snapshot_file(rank: int) -> str:
    """Return the name of the file with the history of a rank's device memory."""
    return f"snapshot-rank{rank}.pickle"


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def read_record(directory: Path) -> RecordFile | None:
    """Return the content of a record directory, or None if no run has finished there."""
    file = directory / RECORD_FILE
    return msgspec.json.decode(file.read_bytes(), type=RecordFile) if file.exists() else None


def read_failures(directory: Path) -> list[Failure]:
    """Return failures of single cases, such as a rank's death; other cases ran the cell again."""
    files = sorted(directory.glob("failure*.json"))
    return [msgspec.json.decode(file.read_bytes(), type=Failure) for file in files]


def write_failure(directory: Path, failure: Failure) -> None:
    """Add a failure to the failures of a record directory, whose lock the caller holds."""
    number = len(read_failures(directory)) + 1
    (directory / f"failure{number:03}.json").write_bytes(msgspec.json.encode(failure))


def read_results(directory: Path) -> list[Any]:
    """Return the result of each rank, in builtin types."""
    results: list[Any] = msgspec.msgpack.decode((directory / RESULTS_FILE).read_bytes())
    return results


def write_results(directory: Path, results: list[Any]) -> None:
    """Write the result of each rank; `write_record` publishes them afterwards."""
    (directory / RESULTS_FILE).write_bytes(msgspec.msgpack.encode(results))


def write_record(directory: Path, content: RecordFile) -> None:
    """Publish a record atomically."""
    temporary = directory / f"{RECORD_FILE}.part"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
    temporary.rename(directory / RECORD_FILE)
