"""Comparisons of each step of a run with the step that one process computes from the same state."""

from functools import lru_cache, partial

import torch
from msgspec.structs import replace

from conformance.assertions import compare
from conformance.assertions.dropout import are_masks_seen, recorded_masks
from conformance.assertions.fixtures import Measure
from conformance.experiments.environment import probe
from conformance.instruments.operators import with_operands
from conformance.numerics.rings import is_ring_sum, ring_of
from conformance.oracles import optimizer_tolerance, tolerance
from conformance.oracles.dtype_policy import FP32, dtype_policy
from conformance.oracles.emulation import Emulation, emulated_step
from conformance.oracles.reference import ReferenceRun, replay_updates
from conformance.outcomes import ConformanceFailure, Unsupported
from conformance.plan.cells import Cell
from conformance.run.record import Record
from reference_trainer.config import LossScaleConfig


def compare_steps(record: Record) -> None:
    """Compare each step's loss and gradients with the emulation, from the weights with which the step began.

    Rounding errors of several steps do not add up that way. A run that inductor compiles in 16 bits is compared by its
    error.
    """
    __tracebackhide__ = True
    config = record.config
    for loss, facts in zip(record.losses, record.ranks[0].steps, strict=True):
        step, name = facts.step, f"of step {facts.step}, emulated"
        expected = emulation_of(record, step)
        gradients = record.select(f"step{step}/gradient/")
        if facts.skipped:  # gradients have overflowed: no numbers to compare
            overflows = not all(bool(grad.isfinite().all()) for grad in expected.gradients.values())
            compare.count(int(overflows), name=f"overflow {name}", expected=1, unit="step")
        elif not rounds_like_eager(record):
            _compare_errors(record, step)
        else:
            within = tolerance.emulated_gradients(config, expected, loss_scale=facts.loss_scale)
            compare.tensors(gradients, expected.gradients, name=f"gradient {name}", within=within)
        loss_bound = tolerance.fp32_loss(config) if rounds_like_eager(record) else tolerance.compiled_loss(config)
        compare.scalars([loss], [expected.loss], name=f"loss {name}", within=loss_bound)


def rounds_like_eager(record: Record) -> bool:
    """Return True unless inductor compiled the run in 16-bit precision, where fusion removes roundings."""
    return record.config.precision == "fp32" or record.config.compile != "inductor"


def _compare_errors(record: Record, step: int) -> None:
    """Compare the distance of a step's gradients from those of fp32 with a lower and an upper limit.

    The lower limit is the error of rounding the weights alone, the upper one that of rounding the result of every
    operator; both allow for chance.
    """
    __tracebackhide__ = True
    exact, weights_rounded = (in_fp32(record, step, rounded=rounded).gradients for rounded in (False, True))
    emulated, gradients = emulation_of(record, step).gradients, record.select(f"step{step}/gradient/")
    error, least, most = (compare.distance(each, exact) for each in (gradients, weights_rounded, emulated))
    factor, name = tolerance.bf16_error_factor(record.config).value, f"error of step {step}, compared with fp32"
    detail, unit = "all gradients", "in the 2-norm"
    compare.between(error, least / factor, most * factor, name=name, detail=detail, unit=unit, kind="rounding")


def emulation_of(record: Record, step: int) -> Emulation:
    """Return the emulation of a step of a run, from the weights with which the step began."""
    return _noted_emulation(record, step)[0]


def operands_of_emulation(record: Record) -> set[str]:
    """Return the operands of operators that add up, in the emulation of the first step of a run."""
    return _noted_emulation(record, record.steps[0])[1]


@lru_cache(maxsize=32)
def _noted_emulation(record: Record, step: int) -> tuple[Emulation, set[str]]:
    """Return the emulation of a step, and its operands if the step is the first of the run.

    It is cached: several laws compare the same step, one after another, and ENV-5 its operands.
    """
    emulate = partial(_emulated, record, step)
    return with_operands(emulate) if step == record.steps[0] else (emulate(), set())


def _emulated(record: Record, step: int) -> Emulation:
    (scale,) = (facts.loss_scale for facts in record.ranks[0].steps if facts.step == step)
    masters = record.select(f"step{step}/parameter/")
    masks, device = recorded_masks(record), record.device_type
    return emulated_step(record.cell.config, masters, step=step, loss_scale=scale, masks=masks, device=device)


def in_fp32(record: Record, step: int, *, rounded: bool = False) -> Emulation:
    """Return a step as one process computes it in fp32, without a loss scale, from the weights with which it began.

    With `rounded` these are first rounded to the dtype in which the run computes.
    """
    config = record.cell.config
    compute = getattr(torch, dtype_policy(config.precision).compute)
    weights = record.select(f"step{step}/parameter/").items()
    masters = {name: (weight.to(compute) if rounded else weight).float() for name, weight in weights}
    exact = replace(config, precision="fp32", loss_scale=LossScaleConfig())
    return emulated_step(exact, masters, step=step, masks=recorded_masks(record), device=record.device_type)


def is_emulated(measure: Measure, record: Record) -> bool:
    """Return whether the emulation knows the masks of dropout of a run, and the order of its sums."""
    return are_masks_seen(record) and is_sum_order_known(measure, record.cell)


def without_checkpoint(cell: Cell) -> Cell:
    """Return the cell of the run that never stopped, for a cell that is resumed on the same mesh."""
    return cell.but(saved_on="none", saving="blocking")


def run_before_save(cell: Cell) -> Cell:
    """Return the cell whose final state the checkpoint of a resumed cell holds."""
    return cell.saver.but(saved_on="none", saving="blocking", steps=cell.steps_before_save)


def compare_updates(record: Record) -> None:
    """Compare norms, parameters and optimizer state with those that the recorded gradients of taken steps imply.

    OPT-2 judges masters below fp32, which lose updates: no bound in fp64 would be useful.
    """
    __tracebackhide__ = True
    if dtype_policy(record.cell.precision).sharded != FP32:
        return
    replayed, optimizer = replayed_parameters(record), record.cell.config.optimizer
    for kind, tensors in replayed.optimizer_state.items():
        within = optimizer_tolerance.replayed_state(replayed, optimizer)
        compare.tensors(record.select(f"final/{kind}/"), tensors, name=f"optimizer state {kind}", within=within)


def replayed_parameters(record: Record) -> ReferenceRun:
    """Compare norms and parameters with those that the recorded gradients of taken steps imply; returns the latter."""
    __tracebackhide__ = True
    require_steps_taken(record)
    optimizer = record.cell.config.optimizer
    initial = record.select("initial/parameter/")
    gradients = {step: record.select(f"step{step}/gradient/") for step in record.steps_taken}
    replayed = replay_updates(record.cell.config, initial, gradients)
    rounding = tolerance.norm(replayed.gradients[0], order=optimizer.norm_order)
    norms = [norm for step, norm in zip(record.steps, record.grad_norms, strict=True) if step in record.steps_taken]
    compare.scalars(norms, replayed.grad_norms, name="gradient norm", within=rounding)
    compare.tensors(
        record.select("final/parameter/"),
        replayed.parameters,
        name="change of parameters",
        origin=initial,
        within=optimizer_tolerance.replayed_updates(replayed, optimizer),
    )
    return replayed


def require_steps_taken(record: Record) -> None:
    """Raise ConformanceFailure for a run all of whose steps are skipped, on which nothing can be judged."""
    __tracebackhide__ = True
    if not record.steps_taken:
        raise ConformanceFailure(f"all of {len(record.steps)} steps are skipped: no loss scale that fits was found")


def require_known_sum_order(measure: Measure, cell: Cell) -> None:
    """Raise Unsupported if the backend adds more than two bf16 numbers in an order that the emulation does not know."""
    if not is_sum_order_known(measure, cell):
        tp = cell.config.mesh.tp
        raise Unsupported(f"sums over {tp} ranks are not taken in ring order by this backend: nothing to compare with")


def is_sum_order_known(measure: Measure, cell: Cell) -> bool:
    """Return whether the emulation knows in which order the backend adds numbers of tensor-parallel ranks.

    In fp32 the bounds allow any order.
    """
    tp = cell.config.mesh.tp
    if tp <= 2 or cell.precision == "fp32":
        return True
    ranks = measure(probe, Cell(mesh=f"dp{tp}"))
    ring = ring_of(ranks[0].kernel_type)
    return all(
        is_ring_sum([sampled.terms for sampled in sums], [sampled.total for sampled in sums], ring)
        for sums in zip(*(facts.bf16_sums for facts in ranks), strict=True)
    )
