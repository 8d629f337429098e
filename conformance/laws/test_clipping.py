"""CLIP: gradients are clipped by the norm of all of them, on every rank alike."""

from collections.abc import Mapping

import torch
from torch import Tensor

from conformance.instruments.collectives import UNKNOWN, Collective
from conformance.judge.law import Measure, Run, law
from conformance.judge.measurements import measure as report
from conformance.laws import compare
from conformance.oracles import tolerance
from conformance.oracles.cache import reference_run
from conformance.oracles.clip_schedule import clip_events
from conformance.oracles.reference import clip_factor, total_norm
from conformance.oracles.schedule import Event
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from conformance.plan.workload import trainer_config
from conformance.run.record import Record
from reference_trainer.parallel_dims import resolve_mesh

CLIP_GRAD_NORM = "https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html"


@law("CLIP-1", reference=CLIP_GRAD_NORM)
def test_the_norm_is_that_of_the_full_gradients(run: Run, cell: Cell) -> None:
    """The norm that is logged MUST be that of the full gradients of one process, and the same number on every rank.

    Wrong if it is a rank's own, if replicas or replicated parameters count more than once, if a maximum is summed, or
    if the type is ignored. Compared with the run's own gradients, each element once, and in fp32 with the reference.
    """
    config, record = trainer_config(cell), run(cell)
    order = config.optimizer.norm_order
    own = [record.select(f"step{step}/gradient/") for step in record.steps]
    compare.scalars(
        record.grad_norms,
        [total_norm(gradients.values(), order=order) for gradients in own],
        name="norm, beside that of the run's own gradients",
        within=tolerance.norm(own[0], order=order),
    )
    logged = {tuple(step.grad_norm for step in facts.steps) for facts in record.ranks}
    detail = f"ranks log {sorted(logged, key=str)}"
    compare.count(len(logged), name="different norms", expected=1, detail=detail, unit="lists of norms")
    if config.precision != "fp32":
        return
    expected = reference_run(config, dtype=torch.float64)
    condition = tolerance.norm_condition(expected.gradients[0], order=order)
    compare.scalars(
        record.grad_norms, expected.grad_norms, name="norm", within=tolerance.fp32_gradients(config) * condition
    )


@law("CLIP-2", reference=CLIP_GRAD_NORM)
def test_gradients_are_scaled_to_the_norm(run: Run, cell: Cell) -> None:
    """Clipping MUST scale all gradients by the one factor that brings their norm down to the limit, and change no bit
    of gradients whose norm is below it.

    Wrong if it is left out, reaches some gradients only, scales each by a norm of its own, or scales up. Compared with
    the run's own gradients, and in fp32 with those of the reference.
    """
    config, record = trainer_config(cell), run(cell)
    order, limit = config.optimizer.norm_order, config.optimizer.max_norm
    for step in record.steps:
        before, after = (record.select(f"step{step}/{kind}/") for kind in ("gradient", "clipped"))
        factor = clip_factor(total_norm(before.values(), order=order), max_norm=limit)
        report(f"factor of step {step}", factor, lower=0.0, upper=1.0, unit="one")
        if factor == 1.0:
            compare.bits(after, before, name="gradients that are within the limit")
        else:
            within = tolerance.clipping(before, order=order)
            compare.tensors(after, _scaled(before, factor), name="clipped gradients, beside their own", within=within)
    if config.precision == "fp32":
        _compare_clipped_with_reference(record)


def _compare_clipped_with_reference(record: Record) -> None:
    config = trainer_config(record.cell)
    order, limit = config.optimizer.norm_order, config.optimizer.max_norm
    reference = reference_run(config, dtype=torch.float64)
    factor = clip_factor(reference.grad_norms[0], max_norm=limit)
    compare.tensors(
        record.select("step0/clipped/"),
        _scaled(reference.gradients[0], factor),
        name="clipped gradients at step 0",
        within=tolerance.clipped_gradients(tolerance.fp32_gradients(config), reference.gradients[0], order=order),
    )


def _scaled(gradients: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: grad.double() * factor for name, grad in gradients.items()}


@law("CLIP-3", reference=CLIP_GRAD_NORM)
def test_a_gradient_that_is_not_finite_stops_every_rank(measure: Measure, cell: Cell) -> None:
    """A gradient that is not finite on one rank MUST raise an error on every rank if asked to, and otherwise on none.

    A rank that raises alone leaves the others waiting in their next collective. NaN and infinity, in what a rank
    computes before gradients are reduced, and in a shard afterwards, where replicas do not have it.
    """
    ranks = measure("clipping:clip_what_is_not_finite", cell)
    wrong = []
    for case in ranks[0]:
        outcomes = [outcome[case] for outcome in ranks]
        if case.startswith("raise/"):
            right = all(outcome["raised"] for outcome in outcomes)
        else:
            spread = "/backward/" in case  # then the norm of every rank must tell
            right = not any(outcome["raised"] or (spread and outcome["norm_is_finite"]) for outcome in outcomes)
        wrong += [] if right else [f"{case}: {outcomes}"]
    compare.count(
        len(wrong),
        name="wrong outcomes",
        expected=0,
        detail="; ".join(wrong[:4]),
        unit=f"of {len(ranks[0])} situations",
    )


@law("CLIP-5", reference=CLIP_GRAD_NORM)
def test_collectives_of_clipping(run: Run, cell: Cell) -> None:
    """Clipping MUST issue the collectives that the norm needs on this mesh, in one order on every rank, and no others.

    Wrong if replicas are counted, a reduction is left out, or each parameter costs a collective of its own.
    """
    config = trainer_config(cell)
    dims = resolve_mesh(config.mesh, world_size=cell.world_size)
    for facts in run(cell).ranks:
        events = clip_events(facts.parameters, config, dims)
        for step in range(cell.steps):
            found = [event for event in facts.collectives if (event.phase, event.step) == ("clip", step)]
            untold = {index for index, event in enumerate(found) if event.reduce_op == UNKNOWN}
            measured = [_sent(event, untold=index in untold) for index, event in enumerate(found)]
            expected = [_sent(event, untold=index in untold) for index, event in enumerate(events)]
            detail = f"rank {facts.rank}, step {step}: {measured}, expected {expected}"
            compare.count(
                len(measured), name="collectives per step", expected=len(expected), detail=detail, unit="collectives"
            )
            if measured != expected:
                raise ConformanceFailure(f"collectives of clipping on {detail}")


def _sent(event: Event | Collective, *, untold: bool) -> tuple[str, str, int, str, str | None]:
    """Up to torch 2.8 an imperative reduction does not tell its operation: what came out is CLIP-1's to judge."""
    return event.kind, event.group, event.numel, event.dtype, UNKNOWN if untold else event.reduce_op
