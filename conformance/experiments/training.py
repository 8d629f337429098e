"""Training runs: the run that leaves a cell's record, the run that it resumes from, and runs with delayed operators."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from conformance.experiments.context import RankWorld, experiment
from conformance.experiments.device_streams import DeviceStreamTrace
from conformance.instruments.capture import Capture
from conformance.instruments.delays import KINDS, delays
from conformance.instruments.held_checkpoints import HeldCheckpoints
from conformance.instruments.recorder import Recorder
from conformance.instruments.streams import StreamTrace, TracedStep
from conformance.instruments.tensor_file import write_tensors
from conformance.plan.cells import ALLOCATOR_VARIABLES, RECORD_STREAMS
from conformance.run.experiment import Needs
from conformance.run.shards import tensor_file
from conformance.sim import device as simulated
from conformance.sim.schedules import FSDP2_STREAMS, Schedule
from reference_trainer.checkpoint import Checkpoints, resume
from reference_trainer.config import TrainerConfig
from reference_trainer.model import Block, Transformer

SCHEDULES = ("eager", "lazy", *(f"starve:{number}" for number in FSDP2_STREAMS.values()), "random:1")
"""Schedules under which a run on the simulated device must be the same."""


@experiment(needs=Needs.TRAINING)
def train_cell(rank: RankWorld) -> dict[str, Any]:
    """Train as the configuration says; returns `facts`, a RankFacts in builtin types.

    The result of an incomplete run is `missing` instead: the events that the trainer has not reported. Each rank writes
    the tensors that it captured into the job's directory, from which a resumed run loads its checkpoint.
    """
    return _trained(rank, tapped=False)


@experiment(needs=Needs.TRAINING)
def train_tapped_cell(rank: RankWorld) -> dict[str, Any]:
    """Train as `train_cell` does, with taps on all modules, which `conformance.localisation` reads."""
    return _trained(rank, tapped=True)


def _trained(rank: RankWorld, *, tapped: bool) -> dict[str, Any]:
    config = rank.config
    variables = {name: os.environ.get(name) for name in (RECORD_STREAMS, *ALLOCATOR_VARIABLES)}
    recorder = Recorder(
        rank=rank.rank,
        variables=variables,
        profiled_step=None if tapped else profiled_step(rank),
        streams=_stream_trace(rank),
        tapped=tapped,
        compiled=_compiled_class(config),
    )
    metrics = []
    with recorder.listening(), _left_taps(recorder, rank):
        trainer = rank.trainer(recorder)
        first = resume(trainer, _checkpoints(rank)) if rank.job.steps_before_save else 0
        steps = range(first, config.steps)
        for step in steps:
            metrics.append(trainer.train_step(step))
            if tapped:
                recorder.keep_state(trainer, step=step)
        missing = recorder.missing(steps, metrics)
        if missing:
            return {"missing": missing}
        facts, tensors = recorder.finish(trainer, metrics)
    if config.compile != "none":
        torch.compiler.reset()  # or the rank's next task would run the graphs of this task
    write_tensors(rank.directory / tensor_file(rank.rank), tensors)
    return {"facts": msgspec.to_builtins(facts)}


def _compiled_class(config: TrainerConfig) -> type[nn.Module] | None:
    if config.compile == "none":
        return None
    return Transformer if config.compiled == "model" else Block


@contextmanager
def _left_taps(recorder: Recorder, rank: RankWorld) -> Iterator[None]:
    """Write the taps, if there are any, when the run ends, or when it raises."""
    try:
        yield
    finally:
        if recorder.taps is not None:
            recorder.taps.write(rank.directory, rank=rank.rank)


def profiled_step(rank: RankWorld) -> int | None:
    """Return the last step, unless it is also the first, on rank 0 of a run on devices without a defect; else None.

    On the CPU the profiler would cost a sixth of a run, and exposed communication there says nothing about devices.
    """
    steps = rank.config.steps - rank.job.steps_before_save
    wanted = rank.context.device and rank.rank == 0 and rank.job.defect is None
    return rank.config.steps - 1 if wanted and steps > 1 else None


def _stream_trace(rank: RankWorld) -> TracedStep | None:
    """Return a trace of the streams in the last step of a run of FSDP2 on the CPU or on the simulated device."""
    kinds: dict[str, type[TracedStep]] = {"cpu": StreamTrace, simulated.NAME: DeviceStreamTrace}
    kind = kinds.get(rank.device.type)
    return kind(rank.config.steps - 1) if kind and rank.config.implementation == "fsdp2" else None


@experiment(needs=Needs.TRAINING)
def train_with_delays(rank: RankWorld) -> dict[str, dict[str, str]]:
    """Train as `train_cell` does with delayed operators; returns fingerprints of all captured tensors.

    The outer key names the delayed operators. On the CPU they are `all` of the last rank, and in a pipeline also those
    of the first, since a delay of the last rank alone delays nothing that it receives. On a device, where streams can
    overtake each other, they are `all`, and each of `delays.KINDS` alone; on the simulated device, the
    schedule chooses. The inner key is that of `Capture`.
    """
    fingerprints = {}
    for name, delayed in _delays(rank).items():
        capture = Capture()
        with delayed():
            trainer = rank.trainer(capture)
            for step in range(rank.config.steps):
                trainer.train_step(step)
        capture.final(trainer.model, trainer.optimizer)
        fingerprints[name] = capture.fingerprints
    return fingerprints


def _delays(rank: RankWorld) -> dict[str, Callable[[], AbstractContextManager[object]]]:
    """Return the contexts in which operators are delayed, by the names of these operators."""
    if rank.device.type == simulated.NAME:
        return {name: partial(_scheduled, name, rank=rank.rank) for name in SCHEDULES}
    pipelined, delayed = rank.config.mesh.pp > 1, partial(delays, device=rank.device, sleeps=rank.is_last)
    contexts: dict[str, Callable[[], AbstractContextManager[object]]] = {"all": partial(delayed, KINDS)}
    if rank.device.type == "cuda":
        contexts |= {kind: partial(delayed, [kind]) for kind in KINDS if pipelined or kind != "transfer"}
    elif pipelined:
        contexts["all of the first rank"] = partial(delayed, KINDS, sleeps=rank.rank == 0)
    return contexts


@contextmanager
def _scheduled(name: str, *, rank: int) -> Iterator[None]:
    simulated.follow(Schedule.parse(name).for_rank(rank))
    yield


@experiment(needs=Needs.TRAINING)
def train_and_save(rank: RankWorld) -> None:
    """Train the first steps of a cell, and save a checkpoint in the job's directory."""
    trainer = rank.trainer()
    steps = rank.job.steps_before_save
    for step in range(steps):
        trainer.train_step(step)
    if rank.job.saving == "async":
        held = HeldCheckpoints(_checkpoints(rank))
        held.save(trainer, steps_done=steps)
        ahead = trainer.train_step(steps)
        (_checkpoints(rank) / f"trained-{ahead.step}").touch()  # AXIS-1 looks for this file
        held.release()
        held.finish()
    else:
        Checkpoints(_checkpoints(rank)).save(trainer, steps_done=steps)


def _checkpoints(rank: RankWorld) -> Path:
    return rank.directory / "checkpoints"
