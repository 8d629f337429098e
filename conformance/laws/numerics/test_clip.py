"""CLIP: the trainer and torch itself clip gradients by the norm of all gradients, equally on every rank."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from conformance.assertions import compare
from conformance.assertions.dropout import are_masks_seen, recorded_masks
from conformance.assertions.fixtures import Measure, Run
from conformance.assertions.steps import require_steps_taken
from conformance.assertions.sweeps import require_no_wrong_result
from conformance.experiments.clipping import (
    AMPLIFICATION,
    AMPLIFIED,
    ClipOutcome,
    NonFiniteClipping,
    clip_grad_norm,
    clip_grad_norm_of_non_finite,
    clip_grad_value,
    clip_non_finite,
)
from conformance.instruments.facts import UNKNOWN, Collective
from conformance.judge.law import law
from conformance.judge.measurements import measure as report
from conformance.oracles import tolerance
from conformance.oracles.clip_schedule import clip_events
from conformance.oracles.frozen import trained
from conformance.oracles.reference import clip_factor, reference_run, total_norm
from conformance.oracles.schedule import Event
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from conformance.run.record import Record
from conformance.sweeps.gradient_options import clip_sweep
from reference_trainer.parallel_dims import resolve_mesh

CLIP_GRAD_NORM = "https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html"
CLIP_GRAD_VALUE = "https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_value_.html"


@law("CLIP-1", where="implementation = fsdp2", gaps=["large-models"], reference=CLIP_GRAD_NORM)
def test_gradient_norm_is_that_of_the_full_gradients(run: Run, cell: Cell) -> None:
    """The logged norm MUST be that of the full gradients of one process, and the same number on every rank.

    Wrong if it is a rank's own, if replicas or replicated parameters count more than once, if a maximum is summed, or
    if the type is ignored. Compared with the run's own gradients, each element once, and in fp32 with the reference.
    """
    config, record = cell.config, run(cell)
    order = config.optimizer.norm_order
    require_steps_taken(record)
    own = [record.select(f"step{step}/gradient/") for step in record.steps_taken]
    compare.scalars(
        [norm for step, norm in zip(record.steps, record.grad_norms, strict=True) if step in record.steps_taken],
        [total_norm(gradients.values(), order=order) for gradients in own],
        name="norm, compared with that of the run's own gradients",
        within=tolerance.norm(own[0], order=order, roundings=tolerance.norm_roundings(config)),
    )
    logged = {tuple(step.grad_norm for step in facts.steps) for facts in record.ranks}
    detail = f"ranks log {sorted(logged, key=str)}"
    compare.count(len(logged), name="different norms", expected=1, detail=detail, unit="lists of norms")
    if not _has_reference(record):
        return
    expected = reference_run(config, dtype=torch.float64, masks=recorded_masks(record))
    within = tolerance.gradient_norm(tolerance.fp32_gradients(config), expected.gradients[0], order=order)
    compare.scalars(record.grad_norms, expected.grad_norms, name="norm", within=within)


@law("CLIP-2", where="implementation = fsdp2", gaps=["large-models"], numbers=True, reference=CLIP_GRAD_NORM)
def test_gradients_are_scaled_to_the_norm(run: Run, cell: Cell) -> None:
    """Clipping MUST scale all gradients by the one factor that brings their norm down to the limit, and change no bit
    of gradients whose norm is below it.

    Wrong if it is left out, reaches some gradients only, scales each by a separate norm, or scales up. Compared with
    the run's own gradients, and in fp32 with those of the reference.
    """
    config, record = cell.config, run(cell)
    order, limit = config.optimizer.norm_order, config.optimizer.max_norm
    require_steps_taken(record)
    for step in record.steps_taken:
        before, after = (record.select(f"step{step}/{kind}/") for kind in ("gradient", "clipped"))
        factor = clip_factor(total_norm(before.values(), order=order), max_norm=limit)
        report(f"factor of step {step}", factor, kind="rounding", lower=0.0, upper=1.0, unit="one")
        if factor == 1.0:
            compare.bits(after, before, name="gradients that are within the limit")
        else:
            within = tolerance.clipping(before, order=order, roundings=tolerance.norm_roundings(config))
            name = "clipped gradients, compared with the run's own"
            compare.tensors(after, _scaled(before, factor), name=name, within=within)
    if _has_reference(record):
        _compare_clipped_with_reference(record)


def _has_reference(record: Record) -> bool:
    """Return whether one process computes the gradients of a run: all its steps are in fp32, and its masks recorded."""
    return (
        record.cell.precision == "fp32"
        and record.cell.float8 == "none"
        and are_masks_seen(record)
        and record.steps[0] == 0
    )


def _compare_clipped_with_reference(record: Record) -> None:
    config = record.cell.config
    order, limit = config.optimizer.norm_order, config.optimizer.max_norm
    reference = reference_run(config, dtype=torch.float64, masks=recorded_masks(record))
    factor = clip_factor(reference.grad_norms[0], max_norm=limit)
    compare.tensors(
        record.select("step0/clipped/"),
        _scaled(reference.gradients[0], factor),
        name="clipped gradients at step 0",
        within=tolerance.clipped_gradients(tolerance.fp32_gradients(config), reference.gradients[0], order=order),
    )


def _scaled(gradients: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: grad.double() * factor for name, grad in gradients.items()}


@law(
    "CLIP-3",
    where="world > 1 and world <= 4 and precision = fp32 and (features = 0 or features = 1 and norm_type = inf "
    "or pp > 1 and features <= 3 and model = cut)",
    own_run=True,
    reference=CLIP_GRAD_NORM,
)
def test_error_if_nonfinite_stops_every_rank(measure: Measure, cell: Cell) -> None:
    """A gradient that is not finite on one rank MUST raise an error on every rank if asked to, and on none if not.

    A rank that raises alone leaves the others waiting in their next collective. NaN and infinity are put into a rank's
    gradient before gradients are reduced, and into a shard afterwards, where replicas do not have them.
    """
    ranks = measure(clip_non_finite, cell)
    wrong = []
    for situation in ranks[0]:
        outcomes = [rank_outcomes[situation] for rank_outcomes in ranks]
        wrong += [] if _agree(situation, outcomes) else [f"{situation}: {outcomes}"]
    unit = f"of {len(ranks[0])} situations"
    compare.count(len(wrong), name="wrong outcomes", expected=0, detail="; ".join(wrong[:4]), unit=unit)


def _agree(situation: str, outcomes: list[ClipOutcome]) -> bool:
    if situation.startswith("raise/"):
        return all(outcome.raised for outcome in outcomes)
    spread = "/backward/" in situation  # the norm of every rank must be non-finite then
    return not any(outcome.raised or (spread and outcome.norm_is_finite) for outcome in outcomes)


@law(
    "CLIP-4",
    where="world > 1 and implementation = fsdp2 and (features = 0 or features = 1 and precision = fp32 "
    "and (norm_type != 2 or clip = 0.1 or model = uneven or foreach_clip = false) or precision = bf16-mixed "
    "and offload = cpu and saved_on = none and norms_in_tp = true and clip != 0.0 and norm_type != inf)",
    gaps=["pipelines"],
    own_run=True,
    reference=CLIP_GRAD_NORM,
)
def test_clip_grad_norm_returns_and_scales_by_the_full_norm(run: Run, measure: Measure, cell: Cell) -> None:
    """torch.nn.utils.clip_grad_norm_ MUST scale sharded gradients by their full norm and return it: as `full_tensor()`,
    and on every rank as the number that `item()` gives.

    Wrong on every rank but one if the norm that is returned was never reduced.
    """
    config, gradients = cell.config, run(cell).select("step0/gradient/")
    order = config.optimizer.norm_order
    if order == math.inf:
        gradients[AMPLIFIED] = gradients[AMPLIFIED] * AMPLIFICATION
    norm = total_norm(gradients.values(), order=order)
    ranks = measure(clip_grad_norm, cell)
    factors = [clip_factor(norm, max_norm=config.optimizer.max_norm)] * len(ranks)
    rounding = max(tolerance.clipping(gradients, order=order).values(), key=lambda bound: bound.value)
    compare.scalars([rank.factor for rank in ranks], factors, name="factor", within=rounding, each="rank")
    alone = [clip_factor(rank.norm_alone, max_norm=rank.norm_alone / 2) for rank in ranks]
    compare.scalars([rank.factor_alone for rank in ranks], alone, name="factor alone", within=rounding, each="rank")
    unevenness = max(rank.unevenness for rank in ranks)
    compare.between(
        unevenness,
        0.0,
        rounding.value,
        name="unevenness",
        detail="scaled gradients",
        unit="relative deviation",
        kind="rounding",
    )
    norms, within = [norm] * len(ranks), tolerance.norm(gradients, order=order)
    compare.scalars([rank.full for rank in ranks], norms, name="full_tensor()", within=within, each="rank")
    compare.scalars([rank.item for rank in ranks], norms, name="item()", within=within, each="rank")


@law("CLIP-5", where="implementation = fsdp2", gaps=["large-models"], reference=CLIP_GRAD_NORM)
def test_collectives_of_clipping(run: Run, cell: Cell) -> None:
    """Clipping MUST issue exactly the collectives that the norm needs on this mesh, in one order on every rank.

    Wrong if replicas are counted, a reduction is left out, or each parameter costs a separate collective.
    """
    config = cell.config
    dims = resolve_mesh(config.mesh, world_size=cell.world_size)
    record = run(cell)
    for facts in record.ranks:
        for step in record.steps:
            events = clip_events(trained(facts.parameters, config, step=step), config, dims)
            issued = [event for event in facts.collectives if (event.phase, event.step) == ("clip", step)]
            hidden = {index for index, event in enumerate(issued) if event.reduce_op == UNKNOWN}
            measured = [_sent(event, hides_operation=index in hidden) for index, event in enumerate(issued)]
            expected = [_sent(event, hides_operation=index in hidden) for index, event in enumerate(events)]
            detail, unit = f"rank {facts.rank}, step {step}: {measured}, expected {expected}", "collectives"
            compare.count(len(measured), name="collectives per step", expected=len(expected), detail=detail, unit=unit)
            if measured != expected:
                raise ConformanceFailure(f"collectives of clipping on {detail}")


def _sent(event: Event | Collective, *, hides_operation: bool) -> tuple[str, str, int, str, str | None]:
    """Return an event to compare, without the operation, which imperative reductions of torch up to 2.8 do not expose.

    CLIP-1 judges the result of such a reduction.
    """
    return event.kind, event.group, event.numel, event.dtype, UNKNOWN if hides_operation else event.reduce_op


@law(
    "CLIP-6",
    where="world > 1 and implementation = fsdp2 and (features = 0 or features = 1 and precision = fp32 "
    "and (norm_type != 2 or foreach_clip = false) or precision = bf16-mixed "
    "and offload = cpu and saved_on = none and norms_in_tp = true and clip != 0.0 and norm_type != inf)",
    gaps=["pipelines"],
    own_run=True,
    reference=CLIP_GRAD_NORM,
    since="2.10",
)
def test_clip_grad_norm_error_if_nonfinite_raises_on_every_rank(measure: Measure, cell: Cell) -> None:
    """torch.nn.utils.clip_grad_norm_ with `error_if_nonfinite` MUST raise an error on every rank if a gradient has a
    NaN or an infinity anywhere, and change nothing then; without, it MUST raise none, and return a norm that is not
    finite.

    Wrong if only the rank that holds the number raises: the others wait for it in their next collective.
    """
    ranks = measure(clip_grad_norm_of_non_finite, cell)
    unit = f"of {len(ranks) * len(ranks[0])}"
    wrong: dict[str, list[str]] = {"not raised": [], "raised unasked": [], "finite norm": [], "changed": []}
    for situation in ranks[0]:
        for rank, outcome in enumerate(rank_outcomes[situation] for rank_outcomes in ranks):
            for fault in _faults(outcome, asked=situation.startswith("raise/")):
                wrong[fault].append(f"{situation} on rank {rank}")
    for fault, outcomes in wrong.items():
        report(fault, len(outcomes), kind="exact", lower=0, upper=0, unit=unit)
    detail = "; ".join(f"{fault}: {', '.join(outcomes[:4])}" for fault, outcomes in wrong.items() if outcomes)
    distinct = {outcome for outcomes in wrong.values() for outcome in outcomes}
    compare.count(len(distinct), name="wrong outcomes", expected=0, detail=detail, unit=unit)


def _faults(outcome: NonFiniteClipping, *, asked: bool) -> Iterator[str]:
    """Yield the faults of an outcome, with or without `error_if_nonfinite`."""
    if outcome.raised != asked:
        yield "not raised" if asked else "raised unasked"
    if outcome.norm_is_finite:
        yield "finite norm"
    if asked and outcome.changed:
        yield "changed"


@law(
    "CLIP-7",
    where="world > 1 and implementation = fsdp2 "
    "and (features = 0 or features = 1 and (precision = bf16-mixed or foreach_clip = false))",
    own_run=True,
    reference=CLIP_GRAD_VALUE,
    since="2.8",
)
def test_clip_grad_value_limits_each_element(measure: Measure, cell: Cell) -> None:
    """torch.nn.utils.clip_grad_value_ MUST bring each element of sharded gradients into [-value, value], and change no
    bit of an element that is there.
    """
    ranks = measure(clip_grad_value, cell)
    for kind in ("outside", "inside"):
        if not sum(getattr(rank, kind) for rank in ranks):
            raise ConformanceFailure(f"no rank has an element of a gradient {kind} the limit: nothing to judge")
    for number, rank in enumerate(ranks):
        compare.count(rank.wrong, name="wrong elements", expected=0, detail=f"rank {number}", unit="elements")


@law(
    "CLIP-8",
    where="id in (dp2-fp32-default-meta-even, hsdp2x2-fp32-default-meta-seed1)",
    reference=CLIP_GRAD_NORM,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_options_of_clipping_do_not_disturb_each_other(measure: Measure, cell: Cell) -> None:
    """Any three options of clip_grad_norm_ together, and of clip_grad_value_, MUST give sharded gradients, and their
    norm, the numbers of one process.

    Also through get_total_norm and clip_grads_with_norm_, with gradients in several dtypes and layouts, and with
    parameters that have none.
    """
    require_no_wrong_result(measure(clip_sweep, cell), unit="options", bounded=f"CLIP-8/{cell.id}")
