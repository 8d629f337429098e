"""Simulation of the predicted step, `python -m conformance predict --simulate`, and its comparison with the prediction.

The trainer itself runs in a simulated world on fake tensors, in one process and without the step's memory: its build,
FSDP2 with its hooks, clipping, optimizer. Only weights are not sampled and data is not read, since NumPy would need
real memory for both. The memory of each phase is compared with the memory model, which is given the activations of the
same model without FSDP, of the same operators: those of the CPU, whose norms, for one, are not fused and keep more than
a GPU's. So the comparison covers all that FSDP2, clipping and the optimizer allocate, keep and free; MEM-1 makes it for
small models with real memory.
"""

import time
from contextlib import ExitStack
from functools import cached_property
from unittest.mock import patch

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from conformance.experiments.context import simulated_world
from conformance.experiments.without_fsdp import (
    parallelize_without_fsdp,
    segments_without_fsdp,
    shards_without_fsdp,
)
from conformance.instruments.fake_tensors import fake_memory_ledger, fake_tensors
from conformance.instruments.memory import MemoryLedger, PhaseMarks
from conformance.memory_segment import MemorySegment
from conformance.oracles.memory_model import predict, state_bytes, usage_by_phase
from conformance.oracles.torch_versions import traits_of
from conformance.oracles.tp_schedule import local_shapes
from conformance.sizing.activations import kept_for_backward
from conformance.sizing.prediction import Request, buffer_bytes, configuration
from reference_trainer.checks import UsageError, require
from reference_trainer.config import DataConfig, TrainerConfig
from reference_trainer.data import Batches
from reference_trainer.model import Transformer
from reference_trainer.parallel_dims import ParallelDims
from reference_trainer.train import Trainer

_CPU = torch.device("cpu")


class Compared(msgspec.Struct, frozen=True):
    """Simulated and predicted bytes of one metric."""

    simulated_bytes: int
    predicted_bytes: int
    ratio: float
    """Quotient of simulated and predicted bytes."""


class Simulation(msgspec.Struct, frozen=True):
    """Simulated memory of rank 0, compared with the memory model."""

    torch: str
    state: Compared
    """Parameters, optimizer state and buffers, between steps."""
    phases: dict[str, dict[str, Compared]]
    """Comparisons by phase, `peak` and `end`, with the state."""
    activation_bytes: int
    """Activations that are kept for backward by the operators of the CPU."""
    wall_s: float
    cpu_s: float
    """CPU time of this process, all threads."""


def simulation(request: Request) -> Simulation:
    """Run two steps on fake tensors, and compare. Raises UsageError for what cannot be predicted or simulated."""
    workload = configuration(request)
    config, dims = replace(workload.config, model=workload.decoder.as_trainer()), workload.dims
    if config.offload != "none":
        raise UsageError(
            f"offload {config.offload} cannot be simulated: the simulated device is the CPU, whose memory is the "
            "host's; leave out --simulate or --offload"
        )
    if dims.pp > 1:
        raise UsageError(
            f"mesh {request.mesh} cannot be simulated: stages would wait for each other; leave out --simulate"
        )
    if dims.cp > 1:
        raise UsageError(
            f"mesh {request.mesh} cannot be simulated: where it looks for shapes of a ring, DTensor makes tensors of "
            "all ranks' length, which would be counted if they are fake; leave out --simulate"
        )
    if request.logits != "kept":
        raise UsageError(f"logits {request.logits} cannot be simulated: the trainer keeps them; leave out --simulate")
    _require_fakes()
    start_s, cpu_start_s = time.perf_counter(), time.process_time()
    step = fake_step(config, dims)
    profile = fake_segments_without_fsdp(config, dims)
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_start_s

    shapes = local_shapes(config.model, tp=dims.tp, tp_rank=0)
    state = _compared(step.state_bytes, state_bytes(config, dims, shapes) + buffer_bytes(workload.decoder))
    simulated = usage_by_phase(step.segments)
    predicted = predict(config, dims, shapes, profile, traits=traits_of(str(torch.__version__)), kernels=False)
    phases = {
        phase: {
            "peak": _compared(simulated[phase].peak_bytes, usage.peak_bytes, state=state),
            "end": _compared(simulated[phase].end_bytes, usage.end_bytes, state=state),
        }
        for phase, usage in predicted.items()
    }
    return Simulation(
        torch=str(torch.__version__),
        state=state,
        phases=phases,
        activation_bytes=kept_for_backward(profile),
        wall_s=wall_s,
        cpu_s=cpu_s,
    )


def _require_fakes() -> None:
    try:
        with simulated_world(1), fake_tensors():
            pass
    except RuntimeError as error:
        raise UsageError(f"--simulate: {error}") from None


def _compared(simulated: int, predicted: int, *, state: Compared | None = None) -> Compared:
    """Compare two numbers of bytes, after adding those of the state."""
    if state:
        simulated, predicted = simulated + state.simulated_bytes, predicted + state.predicted_bytes
    return Compared(simulated, predicted, simulated / predicted)


class FakeStep(msgspec.Struct, frozen=True):
    """Memory of a fake step on rank 0, which has the largest shards."""

    state_bytes: int
    """Bytes held between steps: shards, optimizer state and buffers."""
    segments: list[MemorySegment]
    """Segments of the phases of the step, counting allocations of the step itself."""


def fake_step(config: TrainerConfig, dims: ParallelDims) -> FakeStep:
    """Return the memory of the step that follows a warm step.

    To be called in a process that has not simulated another mesh with as many ranks, whose groups DTensor may have
    cached. Raises ValueError unless the model is sharded before it is materialised.
    """
    require(config.init == "meta", f"init {config.init}: a simulated step needs a model on the meta device, init meta")
    with (
        simulated_world(dims.world_size),
        patch("reference_trainer.train.Batches", _UnreadBatches),
        patch("reference_trainer.build.init_weights", lambda _model, *, seed: None),
        ExitStack() as fake,
    ):
        observer = _FakeOnceSharded(fake)
        with observer.warm_up:
            trainer = Trainer(config, device=_CPU, world_size=dims.world_size, observer=observer)
            trainer.train_step(0)
        with fake_memory_ledger() as ledger:
            trainer.train_step(1)
        return FakeStep(observer.state.kept_bytes, ledger.segments)


def fake_segments_without_fsdp(config: TrainerConfig, dims: ParallelDims) -> list[MemorySegment]:
    """Return the memory that the model needs without FSDP, see `experiments.without_fsdp.segments_without_fsdp`."""
    with simulated_world(dims.tp):
        with torch.device("meta"):
            model = Transformer(config.model)
        parallelize_without_fsdp(model, config, _CPU, tp=dims.tp)
        with fake_tensors():
            model.to_empty(device=_CPU)
            batches = _UnreadBatches(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
            shards = shards_without_fsdp(config, dims, _CPU)
            return segments_without_fsdp(model, batches, config, dims, shards, ledger=fake_memory_ledger)


class _FakeOnceSharded(PhaseMarks):
    """Observer that makes tensors fake once the model is sharded, before it is materialised.

    Not earlier: FSDP chunks each parameter into as many shards as there are ranks, which takes a minute with fake
    tensors and a second on the meta device.
    """

    def __init__(self, fake: ExitStack) -> None:
        self._fake = fake
        self.warm_up = ExitStack()
        """Contexts that are closed after the first step."""
        self.state = MemoryLedger()

    def sharded(self, model: Transformer) -> None:
        self._fake.enter_context(fake_tensors())
        self.state = self.warm_up.enter_context(fake_memory_ledger())


class _UnreadBatches(Batches):
    """Batches of the right shape, whose tokens are not read."""

    def __init__(self, config: DataConfig, *, vocab_size: int, seed: int) -> None:
        self.config, self.vocab_size, self.seed = config, vocab_size, seed

    def global_batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self._tokens, self._tokens

    @cached_property
    def _tokens(self) -> Tensor:
        """Tokens of shape (global_batch_size, seq_len), int64, which torch does not count, like tokens from a file."""
        return torch.zeros((), dtype=torch.int64).expand(self.config.global_batch_size, self.config.seq_len)
