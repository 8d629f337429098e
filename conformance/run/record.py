"""Records: files that a run leaves on disk, and the class through which laws read them.

Full tensors are assembled from the shards that each rank captured, without the collectives that laws judge.
"""

import math
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from safetensors import safe_open

from conformance.instruments.facts import FULL_LAYOUT, RankFacts
from conformance.outcomes import ConformanceFailure, Failure
from conformance.plan.cells import Cell
from conformance.plan.substrates import Substrate
from conformance.run.devices.hardware import device_type, kernel_type
from conformance.run.experiment import TRAINING

if TYPE_CHECKING:
    from torch import Tensor

RECORD_FILE = "record.json"
RESULTS_FILE = "results.msgpack"
"""Results of an experiment by rank; NaN and infinity survive in it."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a record; equal headers mean interchangeable records."""

    schema: Literal[2] = 2
    cell: Cell
    session: str
    torch: str
    substrate: Substrate
    defect: str | None
    experiment: str = TRAINING
    """`MODULE:FUNCTION` that ran on the ranks."""
    alone: bool = False
    """True if the experiment ran in one process."""
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


class Record:
    """Finished training run: facts of all ranks, and full tensors assembled from the shards that ranks captured."""

    def __init__(self, directory: Path, content: RecordFile) -> None:
        self.directory, self.header = directory, content.header
        self._ranks = content.ranks
        self._full: dict[str, dict[str, Any]] = {}

    @property
    def cell(self) -> Cell:
        """Cell that was run."""
        return self.header.cell

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

    @cached_property
    def shards(self) -> "list[dict[str, Tensor]]":
        """Captured tensors of any shape and dtype by rank and key, see `conformance.instruments.capture.Capture`."""
        return [_load(self.directory / tensor_file(rank)) for rank in range(self.cell.world_size)]

    def select(self, prefix: str) -> "dict[str, Tensor]":
        """Return the full tensors whose keys begin with `WHEN/KIND/`, by the rest of the key.

        Elements that no rank holds are NaN. Shapes and dtypes are those of the full parameters.

        Raises KeyError if there is none, ConformanceFailure if a rank's tensor has another shape than its shard, or if
        ranks that hold the same elements hold other bits.
        """
        if prefix not in self._full:
            self._require_equal_copies(prefix)
            names = [key.removeprefix(prefix) for key in self.shards[0] if key.startswith(prefix)]
            if not names:
                raise KeyError(f"record of {self.cell.id} holds no tensor below {prefix}")
            self._full[prefix] = {name: self._assemble(prefix, name) for name in names}
        return dict(self._full[prefix])  # many laws ask for the same tensors, which none of them changes

    def kinds(self, when: str) -> list[str]:
        """Return the kinds of tensors that were captured at a time: KIND of the keys `WHEN/KIND/NAME`, sorted."""
        return sorted({key.split("/")[1] for key in self.ranks[0].fingerprints if key.startswith(f"{when}/")})

    def shards_below(self, prefix: str, *, rank: int) -> "dict[str, Tensor]":
        """Return a rank's tensors whose keys begin with `WHEN/KIND/`, by the rest of the key."""
        return {key.removeprefix(prefix): t for key, t in self.shards[rank].items() if key.startswith(prefix)}

    @cached_property
    def unequal_copies(self) -> list[tuple[str, int]]:
        """Key and rank of each captured tensor that has other bits than the copy of a rank before.

        Copies are tensors of one key that hold the same elements of the full tensor.
        """
        first: dict[tuple[str, str], str] = {}
        unequal = []
        for facts in self.ranks:
            for key, fingerprint in facts.fingerprints.items():
                _, kind, name = key.split("/", 2)
                layout = FULL_LAYOUT if kind == "gathered" else facts.layouts.get(name, FULL_LAYOUT)
                if first.setdefault((key, layout), fingerprint) != fingerprint:
                    unequal.append((key, facts.rank))
        return unequal

    def _require_equal_copies(self, prefix: str) -> None:
        """An assembled tensor has the elements of one rank, and is to stand for the copies of all."""
        for key, rank in self.unequal_copies:
            if key.startswith(prefix):
                raise ConformanceFailure(f"{key}: rank {rank} holds other bits than a rank with the same elements")

    def is_partitioned(self, name: str) -> bool:
        """Return whether the ranks of a parameter hold each of its elements, all equally often."""
        numel = math.prod(self.ranks[0].parameters[name].shape)
        owners = sum(shards[f"layout/{name}"].flatten().bincount(minlength=numel) for shards in self.shards)
        return bool((owners == owners[0]).all()) and int(owners[0]) > 0  # type: ignore[index]

    def _assemble(self, prefix: str, name: str) -> "Tensor":
        facts = self.ranks[0].parameters.get(name)
        if facts is None or f"layout/{name}" not in self.shards[0] or prefix.endswith("/gathered/"):
            return self.shards[0][prefix + name]
        full = self.shards[0][prefix + name].new_full((math.prod(facts.shape),), math.nan)
        for rank, shards in enumerate(self.shards):
            shard, indices = shards.get(prefix + name), shards[f"layout/{name}"]
            if shard is None or shard.shape != indices.shape:
                held = "nothing" if shard is None else f"a tensor of shape {tuple(shard.shape)}"
                raise ConformanceFailure(
                    f"{prefix}{name}: rank {rank} holds {held}, its shard has shape {tuple(indices.shape)}"
                )
            full[indices.flatten()] = shard.flatten()
        return full.view(facts.shape)


def _load(file: Path) -> "dict[str, Tensor]":
    """Return the tensors of a file by key; safetensors imports torch here, in processes that judge tensors only."""
    with safe_open(file, framework="pt") as tensors:
        return {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118 - it is no mapping


def tensor_file(rank: int) -> str:
    """Return the name of the file with the tensors that a rank captured."""
    return f"rank{rank}.safetensors"


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
    """Return failures that belong to one case each, such as a rank's death; other cases ran the cell again."""
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
