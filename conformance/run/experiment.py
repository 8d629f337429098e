"""Experiments as processes without torch see them: names, needs and jobs.

An experiment is a function of `conformance.experiments` or `conformance.sweeps` that ranks call for a law. Its
decorator, `experiments.context.experiment`, declares its needs of torch. A process without torch refers to it by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag, auto
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from conformance.plan.cells import Cell
from conformance.run.ranks.messages import RankContext
from reference_trainer.config import TrainerConfig

Result = TypeVar("Result")


class Needs(Flag):
    """Abilities of torch that an experiment uses and that not every supported version has."""

    NOTHING = 0
    """Process groups and tensors."""
    SHARDING = auto()
    """`fully_shard`."""
    FORWARD = auto()
    """Forward passes of modules sharded by FSDP2, which record events on streams."""
    TRAINING = SHARDING | FORWARD


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of a rank's task: the configuration of a cell, and directories for files."""

    config: TrainerConfig
    world_size: int
    weights: str
    """Format of the checkpoint to load, a value of the axis `weights`."""
    steps_before_save: int
    """Steps of the run that saves the state which this one resumes from; 0 if it starts from step 0."""
    saving: str
    defect: str | None
    directory: str
    """Directory for files of the ranks."""
    kept: str
    """Directory of the record, for files that outlast an experiment."""
    sweep_share: float = 1.0
    """Share of its samples that a sweep tries, see `Experiment.takes_share`."""


def job_of(
    cell: Cell, directory: Path, *, defect: str | None, kept: Path | None = None, sweep_share: float = 1.0
) -> Job:
    """Return the payload for each rank of a cell; `kept` defaults to `directory`."""
    return Job(
        config=cell.config,
        world_size=cell.world_size,
        weights=cell.weights,
        steps_before_save=cell.steps_before_save,
        saving=cell.saving,
        defect=defect,
        directory=str(directory),
        kept=str(kept or directory),
        sweep_share=sweep_share,
    )


def json_like(job: Job) -> dict[str, Any]:
    """Return a job in the types of JSON, in which a tuple of the configuration is a list."""
    payload: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(job))
    return payload


def sampled_ranks(config: TrainerConfig, world_size: int) -> list[int]:
    """Return ranks that represent all of a world: the first of each stage, or without a pipeline two.

    These are the first ranks of the first and of the last data-parallel coordinate. Other ranks of tensor parallelism,
    whose shards may be smaller, would need a process each: DTensor caches the shapes of the rank that a process is.
    """
    if config.mesh.pp > 1:
        return [*range(0, world_size, world_size // config.mesh.pp)]
    return sorted({0, world_size - config.mesh.tp})


Processes = Literal["ranks", "one", "sampled", "ring"]
"""Processes that perform an experiment.

One for each of the cell's ranks; one alone, which may simulate the cell's world; one for each of its `sampled_ranks`,
in a world that it simulates; one for each of the ranks of `mesh.cp`, which may simulate a world.
"""


def number_of_processes(processes: Processes, config: TrainerConfig, world_size: int) -> int:
    """Return how many processes perform an experiment."""
    numbers = {"ranks": world_size, "one": 1, "sampled": len(sampled_ranks(config, world_size)), "ring": config.mesh.cp}
    return numbers[processes]


@dataclass(frozen=True)
class Experiment(Generic[Result]):
    """Function that ranks execute, with its needs of torch."""

    name: str
    """`MODULE:FUNCTION`, as ranks import it."""
    needs: Needs
    processes: Processes
    takes_share: bool
    """True for a sweep that tries the share of its samples for which the profile has time."""
    result: Any
    """Type of each rank's result, made of builtin types and msgspec structs."""
    perform: Callable[[RankContext, Job], Result]

    def __call__(self, context: RankContext, payload: dict[str, Any]) -> Any:
        """Perform the experiment on this rank; returns its result in builtin types."""
        return msgspec.to_builtins(self.perform(context, msgspec.convert(payload, Job)))


TRAINING = "conformance.experiments.training:train_cell"
"""Name of the experiment whose result is a record."""
TAPPED = "conformance.experiments.training:train_tapped_cell"
"""Name of the experiment whose result is a record, and the taps of all modules."""
CALIBRATION = "conformance.experiments.calibration:calibrate"
"""Name of the experiment whose result is the time of a fixed piece of work."""
SAVING = "conformance.experiments.training:train_and_save"
"""Name of the experiment that leaves the checkpoint which a resumed run loads."""
