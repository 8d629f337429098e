"""Comparisons that several laws make: each step of a run, with what one process computes from the same state."""

from conformance.judge.law import Probe
from conformance.judge.skips import Unsupported
from conformance.laws import compare
from conformance.oracles import tolerance
from conformance.oracles.emulation import emulated_step
from conformance.oracles.reference import ReferenceRun, Tensors, replay_updates
from conformance.oracles.virtual_tp import sums_in_ring_order
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from conformance.plan.workload import trainer_config
from conformance.run.record import Record


def compare_steps(record: Record) -> None:
    """Each step's loss and gradients, from the weights in which it began: so that rounding of steps does not add up."""
    __tracebackhide__ = True
    config = trainer_config(record.cell)
    for loss, facts in zip(record.losses, record.ranks[0].steps, strict=True):
        step, name = facts.step, f"of step {facts.step}, emulated"
        masters = record.select(f"step{step}/parameter/")
        expected = emulated_step(config, masters, step=step, loss_scale=facts.loss_scale, device=record.device_type)
        gradients = record.select(f"step{step}/gradient/")
        if facts.skipped:  # then there are no numbers to compare
            compare.count(int(_overflows(expected.gradients)), name=f"overflow {name}", expected=1, unit="step")
        else:
            within = tolerance.emulated_gradients(config, expected)
            compare.tensors(gradients, expected.gradients, name=f"gradient {name}", within=within)
        compare.scalars([loss], [expected.loss], name=f"loss {name}", within=tolerance.fp32_loss(config))


def _overflows(gradients: Tensors) -> bool:
    return not all(bool(grad.isfinite().all()) for grad in gradients.values())


def compare_updates(record: Record) -> None:
    """Norms, parameters and optimizer state, given the gradients that were computed, but those that overflowed."""
    __tracebackhide__ = True
    replayed, optimizer = replayed_parameters(record), trainer_config(record.cell).optimizer
    for kind, tensors in replayed.optimizer_state.items():
        within = tolerance.replayed_state(replayed, optimizer)
        compare.tensors(record.select(f"final/{kind}/"), tensors, name=f"optimizer state {kind}", within=within)


def replayed_parameters(record: Record) -> ReferenceRun:
    """Compare norms and parameters alone; returns what the gradients lead to."""
    __tracebackhide__ = True
    require_steps_taken(record)
    optimizer = trainer_config(record.cell).optimizer
    initial = record.select("initial/parameter/")
    replayed = replay_updates(
        optimizer, initial, [record.select(f"step{step}/gradient/") for step in record.steps_taken]
    )
    rounding = tolerance.norm(replayed.gradients[0], order=optimizer.norm_order)
    norms = [norm for step, norm in zip(record.steps, record.grad_norms, strict=True) if step in record.steps_taken]
    compare.scalars(norms, replayed.grad_norms, name="gradient norm", within=rounding)
    compare.tensors(
        record.select("final/parameter/"),
        replayed.parameters,
        name="change of parameters",
        origin=initial,
        within=tolerance.replayed_updates(replayed, optimizer),
    )
    return replayed


def require_steps_taken(record: Record) -> None:
    """Raises ConformanceFailure for a run that has nothing to judge."""
    __tracebackhide__ = True
    if not record.steps_taken:
        raise ConformanceFailure(f"all of {len(record.steps)} steps are skipped: a scale that fits was not found")


def require_known_sum_order(probe: Probe, cell: Cell) -> None:
    """Sums of more than two bf16 numbers depend on their order: it must be the one that the emulation knows."""
    tp = trainer_config(cell).mesh.tp
    if tp > 2 and not sums_in_ring_order(probe(tp)):
        raise Unsupported(f"sums over {tp} ranks are not taken in ring order by this backend: nothing to compare with")
