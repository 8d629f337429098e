"""Memory of a training step after a warm one: in a real or a simulated world, and on a device behind its host.

Peaks on CUDA devices have not been measured yet: docs/gpu.md.
"""

import contextvars
import gc
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace

from conformance.experiments.context import RankWorld, experiment
from conformance.instruments import accelerators
from conformance.instruments.allocator_snapshot import allocator_snapshot
from conformance.instruments.device_memory import ledger_of
from conformance.instruments.memory import BackendUse, MemoryLedger, PhaseMarks, allocations_alone, mark
from conformance.memory_segment import MemorySegment
from conformance.oracles.expert_routing import route_evenly
from conformance.oracles.memory_model import MEASURED_STEP
from conformance.run.devices.nvml import machine_devices
from conformance.run.experiment import Needs
from conformance.run.record import snapshot_file
from conformance.sim import device as simulated
from conformance.sim.schedules import Schedule
from reference_trainer.config import LossScaleConfig, TrainerConfig
from reference_trainer.observer import Observer, Phase
from reference_trainer.precision import PRECISIONS
from reference_trainer.train import Trainer

MANY_STEPS = 50
"""Steps after which memory must not have grown."""
_MEASURED, _NOT_MEASURED = "measured step", "steps between"
"""Marks at which a measured step begins, and the steps that are not measured."""
_UNSCALED = LossScaleConfig(initial=1.0, growth_interval=MANY_STEPS)


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
    objects: int
    """Python objects that the steps between have left, such as hooks, entries of lists and caches, and events."""


@experiment(needs=Needs.TRAINING)
def step_on_ranks(rank: RankWorld) -> StepMemory:
    """Measure the second step on this rank of a real world; on a device, also write the allocator's history."""
    snapshot = Path(rank.job.kept, snapshot_file(rank.rank))
    with allocator_snapshot(snapshot, rank.device):
        memory = _measured_step(_warm_trainer(rank), MEASURED_STEP)
    if rank.context.device:
        memory.device_level_bytes = machine_devices().used_bytes(rank.context.device)
    return memory


@experiment(needs=Needs.SHARDING | Needs.FORWARD, world="simulated")
def step_in_simulation(rank: RankWorld) -> StepMemory:
    """Measure the second step on rank 0 of a simulated world, and the memory at its begin.

    One ledger is open from before the model is built, so that no copy of parameters or optimizer state escapes it. With
    FSDP1 a ledger begins with the step: FSDP1 frees in it memory of the step before, which its memory model leaves out.
    """
    if rank.config.implementation == "fsdp1":
        return _measured_step(_warm_trainer(rank), MEASURED_STEP)
    return _second_step(rank)


@experiment(needs=Needs.SHARDING | Needs.FORWARD, world="sampled")
def step_of_sampled_ranks(rank: RankWorld) -> StepMemory:
    """Measure as `step_in_simulation` does, on the ranks that `sampled_ranks` names."""
    return _second_step(rank)


def _second_step(rank: RankWorld) -> StepMemory:
    with ledger_of(rank.device, mapped_bytes=rank.mapped_bytes) as ledger:
        trainer = _warm_trainer(rank)  # alive until the ledger is closed
        _marked_step(trainer, MEASURED_STEP)
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
        trainer = _warm_trainer(rank, steps=MANY_STEPS)
        _marked_step(trainer, MEASURED_STEP)
        mark(_NOT_MEASURED)
        with allocations_alone():
            before = _host_objects()
            for step in range(2, MANY_STEPS - 1):
                trainer.train_step(step)
            left = _host_objects() - before
        _marked_step(trainer, MANY_STEPS - 1)
    second, fiftieth = _marked_steps(ledger)
    return Growth(second, fiftieth, left)


def _host_objects() -> int:
    """Return the number of objects of Python that can hold others, without garbage, and of context variables.

    The garbage collector does not list variables that the context of a thread holds.
    """
    gc.collect()
    return len(gc.get_objects()) + len(contextvars.copy_context())


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
    Routers choose experts in turns: rows that arrive at a rank would follow from weights, of which a simulated world
    has copies of one shard.
    """
    config = unscaled(rank.config, steps=steps or rank.config.steps)
    trainer = rank.trainer(PhaseMarks(), config=config)
    route_evenly(trainer.model)
    trainer.train_step(0)
    return trainer


def unscaled(config: TrainerConfig, *, steps: int) -> TrainerConfig:
    """Return the configuration of a run of some steps, of which none is skipped."""
    scales = PRECISIONS[config.precision].scales_loss
    return replace(config, steps=steps, loss_scale=_UNSCALED if scales else config.loss_scale)


def _measured_step(trainer: Trainer, step: int) -> StepMemory:
    with ledger_of(trainer.device) as ledger:
        trainer.train_step(step)
    return StepMemory(ledger.segments, ledger.backend)


_ENDS = ("eager", "lazy")
"""Schedules of the simulated device between which those of any device lie."""
_GROUPS_OF_2_7 = {"0": simulated.Lifetime.RECORD_STREAM, "1": simulated.Lifetime.AVOID_RECORD_STREAMS}
"""Lifetimes of tensors in process groups up to torch 2.7, by the value of TORCH_NCCL_AVOID_RECORD_STREAMS."""
_WIDTH = 4096
_PRODUCTS = 50
"""Number of products: 7 TFLOP, over 0.1 s on the fastest devices, while the host issues a full pass of `deep`."""


class DevicePeaks(msgspec.Struct):
    """Peaks of the caching allocator in one step, in bytes above those before the trainer was built."""

    allocated: int
    """Bytes in use."""
    active: int
    """Bytes in use, or freed and waiting for a stream."""
    reserved: int
    """Bytes that the allocator has taken from the device."""


@experiment(needs=Needs.TRAINING)
def step_on_device(rank: RankWorld) -> dict[str, DevicePeaks]:
    """Measure the second step on a rank's device, by how far the device is behind the host.

    `behind` on CUDA, where the host runs ahead as far as it can. The simulated device is measured at both ends of what
    timings can do: `eager`, where it keeps up, and `lazy`, where it is as far behind as events permit.
    """
    if rank.device.type != simulated.NAME:
        return {"behind": _peaks(rank, _HostAhead(rank.device))}
    peaks = {}
    for name in _ENDS:
        simulated.follow(Schedule.parse(name))
        peaks[name] = _peaks_alone(rank)
    return peaks


@experiment(needs=Needs.TRAINING)
def step_with_older_process_group(rank: RankWorld) -> dict[str, DevicePeaks]:
    """Measure the second step on the simulated device with process groups as NCCL's were up to torch 2.7.

    Returns the peaks by the value of TORCH_NCCL_AVOID_RECORD_STREAMS, which those read, under the schedule `lazy`;
    nothing on another device, whose process groups are those of the installed torch.
    """
    if rank.device.type != simulated.NAME:
        return {}
    simulated.follow(Schedule.parse("lazy"))
    peaks = {}
    for value, lifetime in _GROUPS_OF_2_7.items():
        simulated.use_lifetime(lifetime)
        peaks[value] = _peaks_alone(rank)
    simulated.use_lifetime(simulated.Lifetime.HELD_UNTIL_WAIT)
    return peaks


def _peaks_alone(rank: RankWorld) -> DevicePeaks:
    """Measure on the simulated device, and empty its caches, which would count for the next run."""
    peaks = _peaks(rank, Observer())
    gc.collect()
    torch.accelerator.empty_cache()
    return peaks


def _peaks(rank: RankWorld, observer: Observer) -> DevicePeaks:
    device = rank.device
    before = allocator_bytes(device, "current")
    trainer = rank.trainer(observer)
    trainer.train_step(0)
    accelerators.synchronize()
    accelerators.reset_peaks(device)
    trainer.train_step(1)
    peaks = allocator_bytes(device, "peak")
    return DevicePeaks(**{kind: peak - before[kind] for kind, peak in peaks.items()})


class _HostAhead(Observer):
    """Observer that gives the device work before forward and before backward, as large models do.

    A device that waits for the host is never behind: then no memory waits for a stream, right or wrong.
    """

    def __init__(self, device: torch.device) -> None:
        self._factor, self._product = (torch.zeros(_WIDTH, _WIDTH, device=device) for _ in range(2))

    def phase(self, name: Phase, *, step: int) -> None:
        for _ in range(_PRODUCTS if name in ("forward", "backward") else 0):
            torch.mm(self._factor, self._factor, out=self._product)


def allocator_bytes(device: torch.device, when: str) -> dict[str, int]:
    """Return the `allocated`, `active` and `reserved` bytes of a device; `when` is `current` or `peak`."""
    statistics = accelerators.statistics(device)
    return {kind: statistics[f"{kind}_bytes.all.{when}"] for kind in ("allocated", "active", "reserved")}
