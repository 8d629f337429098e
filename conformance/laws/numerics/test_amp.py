"""AMP: losses of fp16 runs are scaled so that gradients fit, and steps whose gradients overflow are skipped."""

from conformance.assertions import compare
from conformance.assertions.fixtures import Measure, Run
from conformance.assertions.steps import (
    emulation_of,
    in_fp32,
    is_sum_order_known,
    require_steps_taken,
    rounds_like_eager,
)
from conformance.assertions.sweeps import require_no_wrong_result
from conformance.experiments.clipping import overflow_on_last_rank
from conformance.judge.law import law
from conformance.oracles import tolerance
from conformance.oracles.loss_scale import loss_scales
from conformance.plan.cells import Cell
from conformance.run.record import Record
from conformance.sweeps.gradient_options import scaler_sweep

GRAD_SCALER = "https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler"


@law(
    "AMP-1",
    where="precision in (fp16-mp, fp16-reduce) and (features = 1 or features = 2 and optimizer = adamw-fused "
    "or pp > 1 and saved_on = none and loss_scale = fits)",
    reference=GRAD_SCALER,
)
def test_grad_scaler_skips_the_step_on_every_rank(measure: Measure, cell: Cell) -> None:
    """A step whose gradients overflow on ANY rank MUST be skipped on EVERY rank: no bit of parameters and optimizer
    state changes, and all ranks go on with half the scale.

    Ranks that decide for themselves diverge, without an error and without a hang. Infinity and NaN are put into shards
    that only the last rank has: of the embedding, and of a norm, of which tensor-parallel ranks have copies; in a
    pipeline, of any gradient of its stages.
    """
    ranks = measure(overflow_on_last_rank, cell)
    for situation in ranks[0]:
        for rank, outcome in enumerate(outcomes[situation] for outcomes in ranks):
            expected = {"skipped": True, "scale": outcome.scale_before / 2, "changed": []}
            measured = {key: getattr(outcome, key) for key in expected}
            wrong = [
                f"{key} is {measured[key]}, not {value}" for key, value in expected.items() if measured[key] != value
            ]
            name, detail = f"wrong after {situation}", f"rank {rank}: {'; '.join(wrong)}"
            compare.count(len(wrong), name=name, expected=0, detail=detail, unit=f"of {len(expected)} facts")
        trained_on = sum(bool(outcomes[situation].changed_next) for outcomes in ranks)
        name = f"ranks that train on after {situation}"
        compare.count(trained_on, name=name, expected=len(ranks), unit="ranks")


@law("AMP-2", where="precision in (fp16-mp, fp16-reduce)", gaps=["resumed", "large-models"], reference=GRAD_SCALER)
def test_grad_scaler_scale_follows_overflow(run: Run, cell: Cell) -> None:
    """The loss scale MUST begin as configured, be halved by each step whose gradients are not finite, which then
    changes no bit, be doubled after the configured number of other steps, and be the same on every rank.

    Wrong if there is no scaler, if a step with an infinite gradient is taken, or if a step is skipped without need.
    """
    record, options = run(cell), cell.config.loss_scale
    for facts in record.ranks:
        measured = [(step.loss_scale, step.skipped) for step in facts.steps]
        skipped = [_overflows(record, step) for step in record.steps]
        expected = list(zip(loss_scales(options, skipped), skipped, strict=True))
        wrong = sum(a != b for a, b in zip(measured, expected, strict=True))
        detail = f"rank {facts.rank}: (scale, skipped) are {measured}, expected {expected}"
        compare.count(wrong, name="wrong scales", expected=0, detail=detail, unit=f"of {len(measured)} steps")
    require_steps_taken(record)
    for step in set(record.steps[:-1]) - set(record.steps_taken):
        before, after = (record.select(f"step{number}/parameter/") for number in (step, step + 1))
        compare.bits(after, before, name=f"parameters after step {step}, which is skipped")


@law(
    "AMP-3",
    where="precision in (fp16-mp, fp16-reduce)",
    gaps=["experts-in-16-bit", "float8-roundings", "large-models"],
    numbers=True,
    reference=GRAD_SCALER,
)
def test_gradients_do_not_depend_on_the_loss_scale(run: Run, measure: Measure, cell: Cell) -> None:
    """Gradients of a step that is taken MUST be those of fp32 up to the rounding and underflow of fp16, at every scale:
    as far from them as one process that rounds where the run does, and no further than the order of sums leaves open.

    Wrong if gradients are clipped or applied while they are scaled, divided by another scale than the loss was
    multiplied with, or by none.
    """
    config, record = cell.config, run(cell)
    require_steps_taken(record)
    rounds_alike = rounds_like_eager(record) and is_sum_order_known(measure, cell)
    for facts in record.ranks[0].steps:
        if facts.skipped:
            continue
        expected = in_fp32(record, facts.step).gradients
        within = tolerance.fp16_gradients(config, expected, loss_scale=facts.loss_scale)
        emulated, name = emulation_of(record, facts.step), f"gradient of step {facts.step}, compared with fp32"
        compare.tensors(emulated.gradients, expected, name=f"own error of the emulated {name}", within=within)
        if rounds_alike:
            within = tolerance.emulated_deviation(config, emulated, expected, loss_scale=facts.loss_scale)
        compare.tensors(record.select(f"step{facts.step}/gradient/"), expected, name=name, within=within)


@law(
    "AMP-4",
    where="id in (dp2-fp32-default-meta-even, hsdp2x2-fp32-default-meta-seed1)",
    reference=GRAD_SCALER,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_options_of_grad_scaler_do_not_disturb_each_other(measure: Measure, cell: Cell) -> None:
    """Any three options of torch's GradScaler together, and of how it is called, MUST take, skip and scale the steps of
    sharded gradients as in one process, on every rank.

    Also with a gradient that all ranks have, with two optimizers, and after the scaler's state was loaded.
    """
    require_no_wrong_result(measure(scaler_sweep, cell), unit="options", bounded=f"AMP-4/{cell.id}")


def _overflows(record: Record, step: int) -> bool:
    return not all(bool(grad.isfinite().all()) for grad in record.select(f"step{step}/gradient/").values())
