"""Expected tensors of one step, from an oracle in one process that is tapped at the places of the run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec.structs import replace
from torch import Tensor, nn

from conformance.assertions.dropout import recorded_masks
from conformance.bound import EXACT, Bound, bound
from conformance.instruments.taps import Taps
from conformance.localisation.shards import assembled
from conformance.localisation.traces import MicroBatch, Trace, joined
from conformance.oracles import tolerance
from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.emulation import emulated_step
from conformance.run.record import Record
from reference_trainer.config import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class ExpectedTraces:
    """Tapped tensors with which those of a run are compared."""

    traces: Sequence[Trace]
    """Trace of each data-parallel rank, whose tensors are full."""
    within: Bound
    """Relative deviation of a tapped tensor that rounding can explain."""


@dataclass(frozen=True, kw_only=True)
class ExpectedStep(ExpectedTraces):
    """Tensors of one step in one process, from the weights with which the step of the run began."""

    gradients: Mapping[str, Tensor]
    """Reduced gradients before clipping."""
    gradients_within: Mapping[str, Bound]
    loss: float
    """Mean loss over the step, in nats."""
    loss_within: float
    """Relative deviation of the loss that rounding can explain."""
    weight: float
    """Factor with which the gradient of a micro-batch of a data-parallel rank counts in the reduced one."""


def expected_step(record: Record, step: int) -> ExpectedStep:
    """Return a step of a run of the reference trainer as one process computes it."""
    (facts,) = (facts for facts in record.ranks[0].steps if facts.step == step)
    config = _without_tensor_parallelism(record.cell.config)
    parts: dict[int, list[MicroBatch]] = {}

    @contextmanager
    def observe(model: nn.Module, rank: int, micro_batch: int, place: int) -> Iterator[None]:
        taps = Taps()
        taps.phase("forward", step=step)
        parts.setdefault(rank, []).append(MicroBatch(taps, micro_batch, place))
        with taps.attached(model):
            yield

    emulated = emulated_step(
        config,
        assembled(record, f"step{step}/parameter/"),
        step=step,
        loss_scale=facts.loss_scale,
        masks=recorded_masks(record),
        device=record.device_type,
        observe=observe,
    )
    own = record.cell.config
    reduced = tolerance.emulated_gradients(own, emulated, loss_scale=facts.loss_scale)
    within = _of_one_micro_batch(own)
    if within.value > 0.0:
        reduced = {name: bound("max(w, r)", w=within, r=each) for name, each in reduced.items()}
    return ExpectedStep(
        traces=[joined(parts[rank]) for rank in sorted(parts)],
        within=within,
        gradients=emulated.gradients,
        gradients_within=reduced,
        loss=emulated.loss,
        loss_within=max(within.value, tolerance.fp32_loss(own).value),
        weight=1.0 / (len(parts) * facts.loss_scale),
    )


def _without_tensor_parallelism(config: TrainerConfig) -> TrainerConfig:
    return replace(config, mesh=replace(config.mesh, tp=1), loss_parallel=False)


def _of_one_micro_batch(config: TrainerConfig) -> Bound:
    """Return the relative deviation of a tensor of a micro-batch, from the emulation without tensor parallelism.

    Without tensor parallelism the kernels and their operands are the same, so that no bit may differ. Otherwise run and
    emulation are independent computations in the dtype of computation, each of whose tensors has passed a part of the
    stages of a gradient, see `tolerance.fp32_gradients`.
    """
    if config.mesh.tp == 1 and config.compile != "inductor" and not config.tf32:
        return EXACT
    if dtype_policy(config.precision).compute == "float32":
        return tolerance.both(tolerance.fp32_gradients(config))
    return tolerance.both(tolerance.compiled_loss(config))
