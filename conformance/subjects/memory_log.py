"""Memory of a subject's run: peaks by phase, bytes when a phase begins, and bytes held besides the state of training.

One log for all devices: an accelerator's caching allocator tells its statistics, and for the CPU a ledger of storages
takes its place.
"""

import functools
import gc
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from conformance.instruments import accelerators
from conformance.instruments.dispatch_tap import DispatchTap, OutcomeListener
from conformance.instruments.host_storages import HostStorages
from conformance.instruments.sharding import local
from conformance.instruments.threads import runnable_threads
from conformance.subjects.facts import AllocatorFacts, HeldMemory, PhasePeaks
from reference_trainer.observer import Phase

BLOCK_BYTES = 512
"""Size to a multiple of which a caching allocator rounds."""
_POLL_S, _CALM = 0.0005, 3
"""Time between looks at the memory of the CPU, and how many of them must see no change and no thread at work."""
_LONGEST_WAIT_S = 0.5
"""Time after which threads that go on working have nothing to do with the run."""
_SEARCHED_ABOVE_BYTES = 64
"""Bytes besides the state of training above which all objects of Python are searched for their holders."""
_CACHED = type(functools.cache(lambda: None))
BUILD = -1
"""Number of the step before all steps, in which the model is built."""


class Memory(Protocol):
    """Memory of one device, as this process uses it."""

    @property
    def held_bytes(self) -> int:
        """Bytes that are held at present, as torch asked for them."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were held since `reset_peak`."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes of blocks that were freed and waited for a stream, at the peak since `reset_peak`."""

    @property
    def listeners(self) -> Sequence[OutcomeListener]:
        """Listeners that a dispatch tap must have while the run takes place."""

    def settle(self) -> None:
        """Wait until other threads have released memory that this process no longer needs."""

    def reset_peak(self) -> None:
        """Make the bytes held at present the peak."""

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage counts."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Open the context in which the run takes place."""


def memory_of(device: torch.device) -> Memory:
    """Return the memory of a device, from its allocator's statistics, or for the CPU from a ledger of storages."""
    return HostMemory() if device.type == "cpu" else DeviceMemory(device)


class HostMemory(HostStorages):
    """Memory of the CPU, see `HostStorages`."""

    waiting_bytes = 0

    def settle(self) -> None:
        """Wait for threads of process groups, which release their last buffers shortly after an operator has ended.

        A thread of gloo tells the host that an operator has ended before it drops the operator's tensors. On a busy
        machine it may not run for many milliseconds in between, and is runnable all that time.
        """
        calm, until_s = 0, time.monotonic() + _LONGEST_WAIT_S
        while calm < _CALM and time.monotonic() < until_s:
            before = self.held_bytes
            time.sleep(_POLL_S)
            calm = calm + 1 if self.held_bytes == before and not runnable_threads() else 0

    @property
    def listeners(self) -> Sequence[OutcomeListener]:
        """See `Memory`."""
        return [self.listen_to_outcomes]


class DeviceMemory:
    """Memory of an accelerator, from the statistics of its caching allocator."""

    listeners: Sequence[OutcomeListener] = ()

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def held_bytes(self) -> int:
        """See `Memory`."""
        return self._statistics()["requested_bytes.all.current"]

    @property
    def peak_bytes(self) -> int:
        """See `Memory`."""
        return self._statistics()["requested_bytes.all.peak"]

    @property
    def waiting_bytes(self) -> int:
        """See `Memory`."""
        now = self._statistics()
        return now["active_bytes.all.peak"] - now["allocated_bytes.all.peak"]

    def settle(self) -> None:
        """See `Memory`; process groups release the memory of devices when the host has waited."""

    def reset_peak(self) -> None:
        """See `Memory`."""
        accelerators.reset_peaks(self._device)

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """See `Memory`."""
        return storage.device.type == self._device.type

    @contextmanager
    def installed(self) -> Iterator[None]:
        """See `Memory`."""
        yield

    def _statistics(self) -> Mapping[str, int]:
        return accelerators.statistics(self._device)


class MemoryLog:
    """Memory in each phase, and when the model is built and when steps have ended.

    The memory of the suite's own instruments is left out.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.memory = device, memory_of(device)
        self._phase: tuple[int, Phase] = (BUILD, "build")
        self._peaks: dict[tuple[int, Phase], PhasePeaks] = {}
        self._held: list[HeldMemory] = []
        gc.collect()
        self._before_bytes = self._start_bytes = self.memory.held_bytes
        self.memory.reset_peak()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Open a context whose memory counts, for a part of the run that no other tap listens to."""
        with DispatchTap([], outcomes=self.memory.listeners) if self.memory.listeners else ExitStack():
            yield

    def phase(self, name: Phase, *, step: int) -> None:
        """End the present phase, and begin another one."""
        self._end_segment()
        self.memory.settle()
        self._phase, self._start_bytes = (step, name), self.memory.held_bytes

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Open a context whose memory does not count."""
        self._end_segment()
        try:
            yield
        finally:
            self.memory.reset_peak()

    def hold(self, model: nn.Module, optimizer: Optimizer, *, step: int) -> None:
        """Note the bytes held after a step, or after the model was built; garbage is collected before."""
        gc.collect()
        self.memory.settle()
        requested_bytes = self.memory.held_bytes - self._before_bytes
        kinds = dict(_state_tensors(model, optimizer))
        other_bytes = requested_bytes - self._counted_bytes(kinds)
        if other_bytes > _SEARCHED_ABOVE_BYTES:
            kept, sharded = _kept_and_sharded()
            kinds |= {"buffers": [*kinds["buffers"], *filter(self._is_owned, kept)], "sharded": sharded}
            other_bytes = requested_bytes - self._counted_bytes(kinds)
        kinds["tables"] = [tensor for tensor in kinds["buffers"] if tensor.dtype == torch.float32]
        known_bytes = {kind: _bytes(self._on_device(tensors)) for kind, tensors in kinds.items()}
        self._held.append(HeldMemory(step, requested_bytes, known_bytes, other_bytes))

    def _counted_bytes(self, kinds: Mapping[str, Sequence[Tensor]]) -> int:
        every = self._on_device(tensor for tensors in kinds.values() for tensor in tensors)
        return _bytes(storage for storage in every if self.memory.owns(storage))

    def _is_owned(self, tensor: Tensor) -> bool:
        return any(map(self.memory.owns, self._on_device([tensor])))

    def _on_device(self, tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        storages = (local(tensor).untyped_storage() for tensor in tensors)
        return [storage for storage in storages if storage.device.type == self._device.type]

    def _end_segment(self) -> None:
        step, phase = self._phase
        known = self._peaks.get(self._phase, PhasePeaks(step=step, phase=phase, requested_bytes=0, waiting_bytes=0))
        self._peaks[self._phase] = PhasePeaks(
            step=step,
            phase=phase,
            requested_bytes=max(self.memory.peak_bytes - self._before_bytes, known.requested_bytes),
            waiting_bytes=max(self.memory.waiting_bytes, known.waiting_bytes),
            start_bytes=max(self._start_bytes - self._before_bytes, known.start_bytes),
        )
        self.memory.reset_peak()

    def facts(self) -> AllocatorFacts:
        """Return all that was noted."""
        self._end_segment()
        return AllocatorFacts(peaks=list(self._peaks.values()), held=self._held)


def _state_tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Sequence[Tensor]]]:
    """Yield the tensors of the state of training by kind.

    A module's other tensors count as its buffers, if they are no part of a graph: it keeps them for its next call.
    """
    parameters = [*model.parameters()]
    yield "parameters", parameters
    yield "gradients", [parameter.grad for parameter in parameters if parameter.grad is not None]
    kept = [tensor for tensor in _tensors(map(_attributes, model.modules())) if not tensor.requires_grad]
    yield "buffers", [*model.buffers(), *_without_full_copies(kept, parameters)]
    yield "optimizer", [*_tensors(optimizer.state.values())]


def _without_full_copies(kept: Sequence[Tensor], parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Leave out tensors that have the shapes of sharded parameters, such as an average of the full weights.

    A mask may have the shape of one weight by chance: copies are those of at least half of all sharded elements.
    """
    sharded = [parameter for parameter in parameters if _is_sharded(parameter)]
    shapes, copies = Counter(parameter.shape for parameter in sharded), set[int]()
    for tensor in kept:
        if not isinstance(tensor, DTensor) and shapes[tensor.shape]:
            shapes[tensor.shape] -= 1
            copies.add(id(tensor))
    copied = sum(tensor.numel() for tensor in kept if id(tensor) in copies)
    if 2 * copied < sum(parameter.numel() for parameter in sharded):
        return kept
    return [tensor for tensor in kept if id(tensor) not in copies]


def _is_sharded(tensor: object) -> bool:
    return type(tensor) is DTensor and any(hasattr(placement, "dim") for placement in tensor.placements)


def _attributes(module: nn.Module) -> list[object]:
    return [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers")]


def _kept_and_sharded() -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors of no graph that functions with a cache of `functools` keep, and all that are sharded.

    The latter are moving averages of the parameters, or those of a teacher.
    """
    kept: list[object] = []
    sharded: list[Tensor] = []
    for each in gc.get_objects():
        if type(each) is _CACHED:
            kept.append(gc.get_referents(each))
        elif _is_sharded(each):
            sharded.append(each)
    return [tensor for tensor in _tensors(kept) if not tensor.requires_grad], sharded


def _tensors(values: Iterable[object], *, depth: int = 5) -> Iterator[Tensor]:
    """Yield the tensors in containers that are nested no deeper; they may contain themselves."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping | list | tuple) and depth:
            yield from _tensors(value.values() if isinstance(value, Mapping) else value, depth=depth - 1)


def _bytes(storages: Iterable[torch.UntypedStorage]) -> int:
    """Return the bytes of storages, of which several may be one."""
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
