"""Simulation of the step that `prediction` predicts: `python -m conformance predict --simulate`.

The trainer and FSDP2 run in a simulated world on fake tensors. What they hold in each phase is compared with the memory
model, which is given the activations of the same model without FSDP, of the same operators: those of the CPU, whose
norms, for one, are not fused and keep more than a GPU's. So what is compared is all that FSDP2, clipping and the
optimizer allocate, keep and free; as MEM-1 does on small models with real memory.
"""

import time

import msgspec
import torch

from conformance.cli.activation_estimate import kept_for_backward
from conformance.cli.prediction import Request, buffer_bytes, configuration
from conformance.experiments.fake_step import fake_segments_without_fsdp, fake_step
from conformance.experiments.simulation import simulated_world
from conformance.instruments.fake_tensors import fake_tensors
from conformance.oracles.memory_model import predict, state_bytes, usage_by_phase
from conformance.oracles.torch_versions import traits_of
from conformance.oracles.tp_schedule import local_shapes
from reference_trainer.checks import UsageError


class Compared(msgspec.Struct, frozen=True):
    """Metric as it was simulated and as the memory model predicts it, in bytes."""

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
    config, dims = configuration(request)
    if config.offload != "none":
        raise UsageError(
            f"offload {config.offload} cannot be simulated: the simulated device is the CPU, whose memory is the "
            "host's; leave out --simulate or --offload"
        )
    if dims.pp > 1:
        raise UsageError(
            f"mesh {request.mesh} cannot be simulated: stages would wait for each other; leave out --simulate"
        )
    _require_fakes()
    start_s, cpu_start_s = time.perf_counter(), time.process_time()
    step = fake_step(config, dims)
    profile = fake_segments_without_fsdp(config, dims)
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_start_s

    shapes = local_shapes(config.model, tp=dims.tp, tp_rank=0)
    state = _compared(step.state_bytes, state_bytes(config, dims, shapes) + buffer_bytes(config))
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
    """Comparison of two numbers of bytes, to which those of the state are added."""
    if state:
        simulated, predicted = simulated + state.simulated_bytes, predicted + state.predicted_bytes
    return Compared(simulated, predicted, simulated / predicted)
