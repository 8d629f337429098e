"""The step that `prediction` predicts, as it really runs: `python -m conformance predict --simulate`.

The trainer and FSDP2 run in a simulated world on fake tensors. What they hold in each phase is compared with the memory
model, which is given the activations of the same model without FSDP, of the same operators: those of the CPU, whose
norms, for one, are not fused and keep more than a GPU's. So what is compared is all that FSDP2, clipping and the
optimizer allocate, keep and free; as MEM-1 does on small models with real memory.
"""

import time

import msgspec
import torch
from tabulate import tabulate

from conformance.cli.predict import GIB, Prediction, Request, buffer_bytes, configuration, kept_for_backward
from conformance.experiments.fake_step import fake_segments_without_fsdp, fake_step
from conformance.experiments.simulation import simulated_world
from conformance.instruments.fake_tensors import fake_tensors
from conformance.oracles.memory_model import predict, state_bytes, usage_by_phase
from conformance.oracles.torch_versions import traits_of
from conformance.oracles.tp_schedule import local_shapes


class Compared(msgspec.Struct, frozen=True):
    """A figure as it was simulated and as the memory model has it."""

    simulated_bytes: int
    predicted_bytes: int
    ratio: float
    """Of simulated to predicted."""


class Simulation(msgspec.Struct, frozen=True):
    """Of rank 0."""

    torch: str
    state: Compared
    """Parameters, optimizer state and buffers, between steps."""
    phases: dict[str, dict[str, Compared]]
    """By phase `peak` and `end`, with the state."""
    activation_bytes: int
    """What is kept for backward, by the operators of the CPU."""
    wall_s: float
    cpu_s: float
    """Of this process, all threads."""


def simulation(request: Request) -> Simulation:
    """Raises ValueError for what cannot be predicted, or not be simulated."""
    config, dims = configuration(request)
    if config.offload != "none":
        raise ValueError(
            f"offload {config.offload} cannot be simulated: the simulated device is the CPU, whose memory is the "
            "host's; leave out --simulate or --offload"
        )
    _require_fakes()
    wall, cpu = time.perf_counter(), time.process_time()
    step = fake_step(config, dims)
    profile = fake_segments_without_fsdp(config, dims)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu

    shapes = local_shapes(config.model, tp=dims.tp, tp_rank=0)
    state = _compared(step.state_bytes, state_bytes(config, dims, shapes) + buffer_bytes(config))
    simulated = usage_by_phase(step.segments)
    predicted = predict(config, dims, shapes, profile, traits=traits_of(str(torch.__version__)), kernels=False)
    phases = {
        phase: {
            "peak": _compared(simulated[phase].peak_bytes, usage.peak_bytes, beside=state),
            "end": _compared(simulated[phase].end_bytes, usage.end_bytes, beside=state),
        }
        for phase, usage in predicted.items()
    }
    return Simulation(str(torch.__version__), state, phases, kept_for_backward(profile), wall, cpu)


def _require_fakes() -> None:
    try:
        with simulated_world(1), fake_tensors():
            pass
    except RuntimeError as error:
        raise ValueError(f"--simulate: {error}") from None


def _compared(simulated: int, predicted: int, *, beside: Compared | None = None) -> Compared:
    if beside:
        simulated, predicted = simulated + beside.simulated_bytes, predicted + beside.predicted_bytes
    return Compared(simulated, predicted, simulated / predicted)


def as_text(found: Prediction, simulated: Simulation) -> str:
    """A table with what was simulated beside what is predicted, in GiB."""
    figures = {"state": simulated.state}
    figures |= {f"{phase} {kind}": one for phase, kinds in simulated.phases.items() for kind, one in kinds.items()}
    rows = [[name, one.simulated_bytes / GIB, one.predicted_bytes / GIB, one.ratio] for name, one in figures.items()]
    seconds = f"{simulated.wall_s:.0f} s ({simulated.cpu_s:.0f} s of CPU time)"
    headers = ["", "simulated GiB", "predicted GiB", "ratio"]
    operators, estimate = simulated.activation_bytes / GIB, found.activation_bytes / GIB
    return "\n\n".join(
        [
            f"Simulated with torch {simulated.torch} in {seconds}:",
            tabulate(rows, headers=headers, floatfmt=("", ".3f", ".3f", ".4f")),
            f"Both with the activations of the CPU's operators, {operators:.2f} GiB, since norms are not fused there; "
            f"above, with the estimate of {estimate:.2f} GiB.",
        ]
    )
