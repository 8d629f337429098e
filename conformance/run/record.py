"""Records: what a run leaves on disk, and how laws read it."""

import math
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from conformance.plan.substrates import Substrate
from conformance.run.devices.hardware import device_type

if TYPE_CHECKING:
    from torch import Tensor

    from conformance.instruments.recorder import RankFacts

RECORD_FILE = "record.json"
TRAINING = "training:train_cell"
"""What a record is of, if it is not of a measurement."""
MEASURED_FILE = "measured.msgpack"
"""What a measurement found on each rank; NaN and infinity survive in it."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A run that did not finish."""

    kind: Literal["raised", "crash", "timeout", "suite-error"]
    """`suite-error`: the exception came from the suite's own code, not from the product."""
    first_rank: int
    reason: str
    """One line."""
    details: str
    """Tracebacks, stacks and the end of the output of all ranks."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a record is about; equal headers mean interchangeable records."""

    schema: Literal[1] = 1
    cell: Cell
    session: str
    torch: str
    substrate: Substrate
    defect: str | None
    task: str = TRAINING
    """`MODULE:FUNCTION` of `conformance.experiments` that ran on the ranks."""
    alone: bool = False
    """Whether it ran in one process."""
    repeat: int = 0
    """Further runs of the same cell have numbers from 1 on."""


class RecordFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of record.json; `ranks` holds one RankFacts each and is decoded when a law needs it."""

    header: Header
    run_s: float = 0.0
    """Time of all that was done for it, without waiting for others."""
    train_s: float = 0.0
    """Of it, what the slowest rank spent in trainers."""
    ranks: msgspec.Raw = msgspec.Raw(b"[]")
    """Of a training run."""
    failure: Failure | None = None


class Record:
    """A finished run: facts of all ranks, and the tensors put together from what each of them captured."""

    def __init__(self, directory: Path, content: RecordFile) -> None:
        self.directory, self.header = directory, content.header
        self._ranks = content.ranks

    @property
    def cell(self) -> Cell:
        return self.header.cell

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        """Where it was computed; its tensors are on the CPU."""
        return device_type(self.header.substrate)

    @cached_property
    def ranks(self) -> "list[RankFacts]":
        """Facts by rank."""
        from conformance.instruments.recorder import RankFacts  # needs torch, which the controller never imports

        return msgspec.json.decode(self._ranks, type=list[RankFacts])

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps that were executed: from 0, or those after a checkpoint."""
        return [step.step for step in self.ranks[0].steps]

    @property
    def steps_taken(self) -> list[int]:
        """Those of them that were not skipped because a gradient overflowed."""
        return [step.step for step in self.ranks[0].steps if not step.skipped]

    @property
    def losses(self) -> list[float]:
        """Loss of each step in nats; NaN where it was not finite."""
        return [_number(step.loss) for step in self.ranks[0].steps]

    @property
    def grad_norms(self) -> list[float]:
        """Gradient norm of each step before clipping, as the trainer logged it on rank 0."""
        return [_number(step.grad_norm) for step in self.ranks[0].steps]

    @cached_property
    def shards(self) -> "list[dict[str, Tensor]]":
        """What each rank captured by key, see `conformance.instruments.capture.Capture`."""
        from safetensors.torch import load_file

        return [load_file(self.directory / tensor_file(rank)) for rank in range(self.cell.world_size)]

    def select(self, prefix: str) -> "dict[str, Tensor]":
        """The full tensors below `WHEN/KIND/`, by the rest of their key; NaN where no rank holds an element.

        Raises KeyError if there is none, ConformanceFailure if a rank's part has another shape than its shard.
        """
        names = [key.removeprefix(prefix) for key in self.shards[0] if key.startswith(prefix)]
        if not names:
            raise KeyError(f"record of {self.cell.id} holds no tensor below {prefix}")
        return {name: self._assemble(prefix, name) for name in names}

    def is_partitioned(self, name: str) -> bool:
        """Whether the ranks of a parameter hold each of its elements, all equally often."""
        import torch

        held = torch.cat([shards[f"layout/{name}"].flatten() for shards in self.shards])
        owners = held.bincount(minlength=math.prod(self.ranks[0].parameters[name].shape))
        return bool((owners == owners[0]).all()) and int(owners[0]) > 0

    def _assemble(self, prefix: str, name: str) -> "Tensor":
        facts = self.ranks[0].parameters.get(name)
        if facts is None or f"layout/{name}" not in self.shards[0] or prefix.endswith("/gathered/"):
            return self.shards[0][prefix + name]
        whole = self.shards[0][prefix + name].new_full((math.prod(facts.shape),), math.nan)
        for rank, shards in enumerate(self.shards):
            part, indices = shards.get(prefix + name), shards[f"layout/{name}"]
            if part is None or part.shape != indices.shape:
                found = "nothing" if part is None else f"a tensor of shape {tuple(part.shape)}"
                raise ConformanceFailure(
                    f"{prefix}{name}: rank {rank} holds {found}, its shard has shape {tuple(indices.shape)}"
                )
            whole[indices.flatten()] = part.flatten()
        return whole.view(facts.shape)


def tensor_file(rank: int) -> str:
    """Name of the file with the tensors that a rank captured."""
    return f"rank{rank}.safetensors"


def snapshot_file(rank: int) -> str:
    """Name of the file with the history of a rank's device memory."""
    return f"snapshot-rank{rank}.pickle"


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def read_record(directory: Path) -> RecordFile | None:
    """The content of a record directory, or None if no run has finished in it."""
    file = directory / RECORD_FILE
    return msgspec.json.decode(file.read_bytes(), type=RecordFile) if file.exists() else None


def read_failures(directory: Path) -> list[Failure]:
    """Failures that belong to one case each, such as the death of a rank: other laws have run the cell again."""
    files = sorted(directory.glob("failure*.json"))
    return [msgspec.json.decode(file.read_bytes(), type=Failure) for file in files]


def write_failure(directory: Path, failure: Failure) -> None:
    """Beside those that are there; under the lock of the directory."""
    number = len(read_failures(directory)) + 1
    (directory / f"failure{number:03}.json").write_bytes(msgspec.json.encode(failure))


def read_measured(directory: Path) -> list[Any]:
    """What each rank found."""
    found: list[Any] = msgspec.msgpack.decode((directory / MEASURED_FILE).read_bytes())
    return found


def write_measured(directory: Path, found: list[Any]) -> None:
    """To be called before `write_record`, which publishes it."""
    (directory / MEASURED_FILE).write_bytes(msgspec.msgpack.encode(found))


def write_record(directory: Path, content: RecordFile) -> None:
    """Publish a record: readers see all of it or nothing."""
    temporary = directory / f"{RECORD_FILE}.part"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
    temporary.rename(directory / RECORD_FILE)
