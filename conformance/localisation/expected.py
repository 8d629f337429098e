"""Expected tensors of one step, from an oracle in one process that is tapped at the places of the run."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import NamedTuple

from msgspec.structs import replace
from torch import Tensor, nn

from conformance.assertions.dropout import recorded_masks
from conformance.bound import EXACT, Bound, bound
from conformance.instruments.taps import Tap, Taps
from conformance.localisation.shards import assembled
from conformance.localisation.traces import MicroBatch, Trace, joined
from conformance.oracles import tolerance
from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.emulation import emulated_step
from conformance.run.record import Record
from reference_trainer.config import TrainerConfig


class PlaceRule(NamedTuple):
    """Rule for the tensor at one place."""

    within: Bound
    """Relative deviation that rounding can explain."""
    dtypes: Collection[str]
    """Dtypes that it may have; any if there is none."""


Place = tuple[int, int, str, str, str, int]
"""Data-parallel rank, step, module, kind, item and call of a tap."""


@dataclass(frozen=True, kw_only=True)
class ExpectedTraces:
    """Tapped tensors with which those of a run are compared."""

    traces: Sequence[Trace]
    """Trace of each data-parallel rank, whose tensors are full."""
    within: Bound
    """Relative deviation of a tapped tensor that rounding can explain."""
    places: Mapping[Place, PlaceRule] | None = None
    """Rules by data-parallel rank and place, if there is not one for all."""
    is_layout_known: bool = True
    """False if plain tensors inside of a module may be laid out as its trainer likes, such as in partial sums: a module
    whose result agrees again is then right."""
    reduced: Collection[str] = ()
    """Parameters whose reduced gradients agree, so that those of one micro-batch are laid out as the trainer likes."""

    def within_at(self, data_rank: int, tap: Tap) -> float:
        """Return the relative deviation that is allowed at the place of a tap; infinite where nothing is compared."""
        rule = self._rule(data_rank, tap)
        return self.within.value if rule is None else rule.within.value

    def dtypes_at(self, data_rank: int, tap: Tap, oracle: str) -> Collection[str]:
        """Return the dtypes that are allowed at the place of a tap, where the oracle has one; any if there is none."""
        rule = self._rule(data_rank, tap)
        return [oracle] if rule is None else rule.dtypes

    def _rule(self, data_rank: int, tap: Tap) -> PlaceRule | None:
        return self.places.get((data_rank, *tap.place[:-1])) if self.places is not None else None


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
    order: Sequence[str]
    """Parameters in the order in which backward computes their gradients."""
    weight: float
    """Factor with which the gradient of a micro-batch of a data-parallel rank counts in the reduced one."""


def expected_step(record: Record, step: int) -> ExpectedStep:
    """Return a step of a run of the reference trainer as one process computes it."""
    (facts,) = (facts for facts in record.ranks[0].steps if facts.step == step)
    config = _without_tensor_parallelism(record.cell.config)
    micro_batches: dict[int, list[MicroBatch]] = {}

    @contextmanager
    def observe(model: nn.Module, rank: int, micro_batch: int, place: int) -> Iterator[None]:
        taps = Taps()
        taps.phase("forward", step=step)
        micro_batches.setdefault(rank, []).append(MicroBatch(taps, micro_batch, place))
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
    within = _within_one_micro_batch(own)
    if within.value > 0.0:
        reduced = {name: bound("max(w, r)", w=within, r=each) for name, each in reduced.items()}
    traces = [joined(micro_batches[rank]) for rank in sorted(micro_batches)]
    return ExpectedStep(
        traces=[_without_terms(trace, own) for trace in traces],
        within=within,
        # A step that is skipped because of an overflow has no gradients that a sum in another order would have, too.
        gradients={} if facts.skipped else emulated.gradients,
        gradients_within=reduced,
        loss=emulated.loss,
        loss_within=max(within.value, tolerance.fp32_loss(own).value),
        order=backward_order(traces[0]),
        weight=1.0 / (len(micro_batches) * facts.loss_scale),
    )


_PARTIAL_IN_MIXTURES = {
    *(("experts", "output"), ("experts", "input gradient"), ("shared", "output")),
    *(("router", "output gradient"), ("router", "input gradient")),
}
"""Modules in a mixture of experts, and kinds of their plain tensors that are terms of sums over tensor-parallel ranks.

The mixture adds them up, and its output, and the gradient of its input, are summed over the ranks.
"""


def backward_order(trace: Trace) -> list[str]:
    """Return the parameters in the order in which backward computes their gradients."""
    return [f"{tap.module}.{tap.item}" for tap in trace.taps if tap.kind == "parameter gradient"]


def _without_terms(trace: Trace, config: TrainerConfig) -> Trace:
    """Leave out tensors of experts that have the rows of other ranks, or are terms of sums over ranks."""

    def is_term(tap: Tap) -> bool:
        module = tap.module.rpartition(".")[2]
        has_other_rows = module == "experts" and config.mesh.ep > 1
        return has_other_rows or (config.mesh.tp > 1 and (module, tap.kind) in _PARTIAL_IN_MIXTURES)

    kept = [index for index, tap in enumerate(trace.taps) if not is_term(tap)]
    return with_fields(
        trace, taps=[trace.taps[index] for index in kept], tensors=[trace.tensors[index] for index in kept]
    )


def _without_tensor_parallelism(config: TrainerConfig) -> TrainerConfig:
    return replace(config, mesh=replace(config.mesh, tp=1, ep=1), loss_parallel=False)


def _within_one_micro_batch(config: TrainerConfig) -> Bound:
    """Return the relative deviation of a tensor of a micro-batch, from the emulation without tensor parallelism.

    Without tensor parallelism, and with all experts on each rank, the kernels and their operands are the same, so that
    no bit may differ. Otherwise run and
    emulation are independent computations in the dtype of computation, each of whose tensors has passed a part of the
    stages of a gradient, see `tolerance.fp32_gradients`.
    """
    if config.mesh.tp == config.mesh.ep == 1 and config.compile != "inductor" and not config.tf32:
        return EXACT
    if dtype_policy(config.precision).compute == "float32":
        return tolerance.both(tolerance.fp32_gradients(config))
    return tolerance.both(tolerance.compiled_loss(config))
