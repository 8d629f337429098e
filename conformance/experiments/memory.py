"""Memory of a training step after a warm one, in a real or a simulated world."""

import gc
from pathlib import Path

import msgspec
from msgspec.structs import replace

from conformance.experiments.context import RankWorld, experiment
from conformance.instruments.allocator_snapshot import allocator_snapshot
from conformance.instruments.device_memory import ledger_of
from conformance.instruments.memory import BackendUse, MemoryLedger, PhaseMarks, allocations_alone, mark
from conformance.memory_segment import MemorySegment
from conformance.run.devices.nvml import machine_devices
from conformance.run.experiment import Needs
from conformance.run.record import snapshot_file
from reference_trainer.config import LossScaleConfig
from reference_trainer.precision import PRECISIONS
from reference_trainer.train import Trainer

_MANY_STEPS = 50
_MEASURED, _NOT_MEASURED = "measured step", "steps between"
"""Marks at which a measured step begins, and the steps that are not measured."""
_UNSCALED = LossScaleConfig(initial=1.0, growth_interval=_MANY_STEPS)


class StepMemory(msgspec.Struct):
    """Memory of one step on one rank."""

    segments: list[MemorySegment]
    """Segments of the phases of the step, in the order of the phases."""
    backend: list[BackendUse]
    """Bytes that the process group allocated for operators of c10d."""
    device_level_bytes: int = 0
    """Bytes of the device that are in use by any process, as NVML reports them; 0 on the CPU."""
    held_before_bytes: int = 0
    """Bytes allocated since before the model was built and still held when the step begins.

    0 on real ranks and with FSDP1, where the ledger begins with the step."""


class Growth(msgspec.Struct):
    """Memory of an early and of a late step."""

    second: StepMemory
    fiftieth: StepMemory


@experiment(needs=Needs.TRAINING)
def step_on_ranks(rank: RankWorld) -> StepMemory:
    """Measure the second step on this rank of a real world; on a device, also write the allocator's history."""
    snapshot = Path(rank.job.kept, snapshot_file(rank.rank))
    with allocator_snapshot(snapshot, rank.device):
        memory = _measured_step(_warm_trainer(rank), 1)
    if rank.context.device:
        memory.device_level_bytes = machine_devices().used_bytes(rank.context.device)
    return memory


@experiment(needs=Needs.SHARDING | Needs.FORWARD, world="simulated")
def step_in_simulation(rank: RankWorld) -> StepMemory:
    """Measure the second step on rank 0 of a simulated world, and the memory at its begin.

    One ledger is open from before the model is built, so that no copy of parameters or optimizer state escapes it. With
    FSDP1 a ledger begins with the step: FSDP1 frees in it memory of the step before, which its memory model leaves out.
    """
    return _measured_step(_warm_trainer(rank), 1) if rank.config.implementation == "fsdp1" else _second_step(rank)


@experiment(needs=Needs.SHARDING | Needs.FORWARD, world="sampled")
def step_of_sampled_ranks(rank: RankWorld) -> StepMemory:
    """Measure as `step_in_simulation` does, on the ranks that `sampled_ranks` names."""
    return _second_step(rank)


def _second_step(rank: RankWorld) -> StepMemory:
    with ledger_of(rank.device, mapped_bytes=rank.mapped_bytes) as ledger:
        trainer = _warm_trainer(rank)  # alive until the ledger is closed
        _marked_step(trainer, 1)
    (memory,) = _marked_steps(ledger)
    return memory


@experiment(needs=Needs.SHARDING | Needs.FORWARD, world="simulated")
def growth_in_simulation(rank: RankWorld) -> Growth:
    """Measure the second and the fiftieth step on rank 0 of a simulated world, and the memory before them."""
    return _growth(rank)


@experiment(needs=Needs.SHARDING | Needs.FORWARD, world="sampled")
def growth_of_stages(rank: RankWorld) -> Growth:
    """Measure as `growth_in_simulation` does, on the first rank of each stage of a pipeline."""
    return _growth(rank)


def _growth(rank: RankWorld) -> Growth:
    with ledger_of(rank.device, mapped_bytes=rank.mapped_bytes) as ledger:
        trainer = _warm_trainer(rank, steps=_MANY_STEPS)
        _marked_step(trainer, 1)
        mark(_NOT_MEASURED)
        with allocations_alone():
            for step in range(2, _MANY_STEPS - 1):
                trainer.train_step(step)
        _marked_step(trainer, _MANY_STEPS - 1)
    second, fiftieth = _marked_steps(ledger)
    return Growth(second, fiftieth)


def _marked_step(trainer: Trainer, step: int) -> None:
    gc.collect()  # so that garbage in cycles of earlier steps is not released into the measured step
    mark(_MEASURED)
    if trainer.train_step(step).skipped:
        raise RuntimeError(f"step {step} was skipped: its gradients are not finite although losses are not scaled")


def _marked_steps(ledger: MemoryLedger) -> list[StepMemory]:
    """Return the memory of each measured step, in bytes above that at its begin."""
    steps: list[StepMemory] = []
    measuring = False
    for segment in ledger.segments:
        if segment.mark == _MEASURED:
            steps.append(StepMemory([], ledger.backend, held_before_bytes=segment.start_bytes))
        measuring = segment.mark != _NOT_MEASURED and (measuring or segment.mark == _MEASURED)
        if measuring:
            steps[-1].segments.append(segment.above(steps[-1].held_before_bytes))
    return steps


def _warm_trainer(rank: RankWorld, *, steps: int | None = None) -> Trainer:
    """Return a trainer after one step, with the state of the optimizer and the streams and buffers of FSDP.

    Losses are not scaled: a step that is skipped since fp16 overflows needs other memory than one that is taken.
    """
    config = replace(rank.config, steps=steps or rank.config.steps)
    if PRECISIONS[config.precision].scales_loss:
        config = replace(config, loss_scale=_UNSCALED)
    trainer = rank.trainer(PhaseMarks(), config=config)
    trainer.train_step(0)
    return trainer


def _measured_step(trainer: Trainer, step: int) -> StepMemory:
    with ledger_of(trainer.device) as ledger:
        trainer.train_step(step)
    return StepMemory(ledger.segments, ledger.backend)
