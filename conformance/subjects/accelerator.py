"""Instruments of a subject's run on the simulated accelerator: its streams in all steps, and its memory.

Memory is told as peaks by phase, and as bytes that are held besides the state of training.
"""

import gc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conformance.experiments.device_streams import DeviceStreamTrace
from conformance.instruments import accelerators
from conformance.instruments.sharding import local
from conformance.sim import device as simulated
from conformance.sim import schedules
from conformance.sim.schedules import Schedule
from conformance.subjects.facts import AcceleratorFacts, AllocatorFacts, HeldMemory, PhasePeaks
from reference_trainer.observer import Phase

BLOCK_BYTES = 512
"""Size to a multiple of which a caching allocator rounds."""
BUILD = -1
"""Number of the step before all steps, in which the model is built."""


class AcceleratorLog:
    """Streams and memory of one rank's run under a schedule."""

    def __init__(self, device: torch.device, *, schedule: str, rank: int, last_step: int) -> None:
        """Let the device follow a schedule, by default the session's, before the run is built."""
        self._schedule = schedule or os.environ[schedules.VARIABLE]
        self._first_stream = torch.Stream(device=device).stream_id  # those of the run get the next numbers
        simulated.follow(Schedule.parse(self._schedule).for_rank(rank))
        self._last_step, self._has_ended = last_step, False
        self.trace, self.allocator = DeviceStreamTrace(last_step, reads_order=True), AllocatorLog(device)

    def phase(self, name: Phase, *, step: int) -> None:
        """Tell the phase that begins; streams are traced from the first step to the end of the last one."""
        self._has_ended = self._has_ended or (name, step) == ("idle", self._last_step)
        if self._has_ended:
            self.trace.end()
        else:
            self.trace.open()
        self.allocator.phase(name, step=step)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Open a context for operators of the suite: their memory does not count, and their waits order nothing."""
        with ExitStack() as stack:
            stack.enter_context(self.allocator.paused())
            stack.enter_context(self.trace.unseen())
            yield

    def facts(self) -> AcceleratorFacts:
        """Return all that was seen; the run has ended."""
        busy = [stream - self._first_stream for stream in self.trace.busy_streams()]
        return AcceleratorFacts(
            schedule=self._schedule,
            busy_streams=[number for number in busy if number > 0],
            streams=self.trace.facts(),
            allocator=self.allocator.facts(),
        )


class AllocatorLog:
    """Peaks of the caching allocator in each phase, and its memory when the model is built and when steps have ended.

    The memory of the suite's own instruments is left out.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase: tuple[int, Phase] = (BUILD, "build")
        self._peaks: dict[tuple[int, Phase], PhasePeaks] = {}
        self._held: list[HeldMemory] = []
        gc.collect()
        self._before = self._statistics()
        accelerators.reset_peaks(device)

    def phase(self, name: Phase, *, step: int) -> None:
        """End the present phase, and begin another one."""
        self._end_segment()
        self._phase = (step, name)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Open a context whose memory does not count."""
        self._end_segment()
        try:
            yield
        finally:
            accelerators.reset_peaks(self._device)

    def hold(self, model: nn.Module, optimizer: Optimizer, *, step: int) -> None:
        """Note the bytes held after a step, or after the model was built; garbage is collected before."""
        gc.collect()
        now = self._statistics()
        kinds = dict(_state_tensors(model, optimizer))
        known = {kind: _bytes_on(self._device, tensors) for kind, tensors in kinds.items()}
        requested = now["requested_bytes.all.current"] - self._before["requested_bytes.all.current"]
        distinct = _bytes_on(self._device, [tensor for tensors in kinds.values() for tensor in tensors])
        self._held.append(HeldMemory(step, requested, known, requested - distinct))

    def _statistics(self) -> Mapping[str, int]:
        return accelerators.statistics(self._device)

    def _end_segment(self) -> None:
        now, before = self._statistics(), self._before
        found = PhasePeaks(
            step=self._phase[0],
            phase=self._phase[1],
            requested_bytes=now["requested_bytes.all.peak"] - before["requested_bytes.all.current"],
            waiting_bytes=now["active_bytes.all.peak"] - now["allocated_bytes.all.peak"],
        )
        known = self._peaks.get(self._phase, found)
        self._peaks[self._phase] = PhasePeaks(
            step=found.step,
            phase=found.phase,
            requested_bytes=max(found.requested_bytes, known.requested_bytes),
            waiting_bytes=max(found.waiting_bytes, known.waiting_bytes),
        )
        accelerators.reset_peaks(self._device)

    def facts(self) -> AllocatorFacts:
        """Return all that was noted."""
        self._end_segment()
        return AllocatorFacts(peaks=list(self._peaks.values()), held=self._held)


def _state_tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Sequence[Tensor]]]:
    """Yield the tensors of the state of training by kind; a module's other tensors count as its buffers."""
    parameters = [*model.parameters()]
    yield "parameters", parameters
    yield "gradients", [parameter.grad for parameter in parameters if parameter.grad is not None]
    attributes = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    yield "buffers", [*model.buffers(), *attributes]
    yield "optimizer", [*_tensors(optimizer.state.values())]


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _bytes_on(device: torch.device, tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of these tensors on a device; tensors may share one."""
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.device.type == device.type}
    return sum(sizes.values())
