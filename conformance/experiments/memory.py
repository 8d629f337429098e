"""Memory of a training step after a warm one, in a real or a simulated world."""

from pathlib import Path

import msgspec
from msgspec.structs import replace

from conformance.experiments.context import RankWorld, experiment
from conformance.instruments.allocator_snapshot import allocator_snapshot
from conformance.instruments.device_memory import ledger_of
from conformance.instruments.memory import BackendUse, PhaseMarks
from conformance.memory_segment import MemorySegment
from conformance.run.devices.nvml import machine_devices
from conformance.run.experiment import Needs
from conformance.run.record import snapshot_file
from reference_trainer.train import Trainer

_MANY_STEPS = 50


class StepMemory(msgspec.Struct):
    """Memory of one step on one rank."""

    segments: list[MemorySegment]
    """Segments of the phases of the step, in the order of the phases."""
    backend: list[BackendUse]
    """Bytes that the process group allocated for operators of c10d."""
    device_level_bytes: int = 0
    """Bytes of the device that are in use by any process, as NVML reports them; 0 on the CPU."""


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
    """Measure the second step on rank 0 of a simulated world."""
    return _measured_step(_warm_trainer(rank), 1)


@experiment(needs=Needs.SHARDING | Needs.FORWARD, world="simulated")
def growth_in_simulation(rank: RankWorld) -> Growth:
    """Measure the second and the fiftieth step on rank 0 of a simulated world."""
    trainer = _warm_trainer(rank, steps=_MANY_STEPS)
    second = _measured_step(trainer, 1)
    for step in range(2, _MANY_STEPS - 1):
        trainer.train_step(step)
    return Growth(second, _measured_step(trainer, _MANY_STEPS - 1))


def _warm_trainer(rank: RankWorld, *, steps: int | None = None) -> Trainer:
    """Return a trainer after one step, with the state of the optimizer and the streams and buffers of FSDP."""
    config = rank.config if steps is None else replace(rank.config, steps=steps)
    trainer = rank.trainer(PhaseMarks(), config=config)
    trainer.train_step(0)
    return trainer


def _measured_step(trainer: Trainer, step: int) -> StepMemory:
    with ledger_of(trainer.device) as ledger:
        trainer.train_step(step)
    return StepMemory(ledger.segments, ledger.backend)
