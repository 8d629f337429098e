"""AMP: in fp16, losses are scaled so that gradients fit, and steps in which they do not are skipped."""

from msgspec.structs import replace

from conformance.judge.law import Measure, Run, law
from conformance.laws import compare
from conformance.laws.steps import require_steps_taken
from conformance.oracles import tolerance
from conformance.oracles.emulation import emulated_step
from conformance.oracles.loss_scale import loss_scales
from conformance.plan.cells import Cell
from conformance.plan.workload import trainer_config
from conformance.run.record import Record

GRAD_SCALER = "https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler"


@law("AMP-1", reference=GRAD_SCALER)
def test_overflow_on_one_rank_skips_the_step_on_every_rank(measure: Measure, cell: Cell) -> None:
    """A step whose gradients overflow on ANY rank MUST be skipped on EVERY rank: no bit of parameters and optimizer
    state changes, and all ranks go on with half the scale.

    Ranks that decide each by themselves drift apart, without an error and without a hang. Infinity and NaN, in a shard
    of the last rank that no other has: of the embedding, and of a norm, of which tensor-parallel ranks have copies.
    """
    ranks = measure("loss_scaling:overflow_on_one_rank", cell)
    for situation in ranks[0]:
        for rank, found in enumerate(outcome[situation] for outcome in ranks):
            expected = {"skipped": True, "scale": found["scale_before"] / 2, "changed": []}
            wrong = [f"{key} is {found[key]}, not {value}" for key, value in expected.items() if found[key] != value]
            name, detail = f"wrong after {situation}", f"rank {rank}: {'; '.join(wrong)}"
            compare.count(len(wrong), name=name, expected=0, detail=detail, unit=f"of {len(expected)} facts")
        trained_on = sum(bool(outcome[situation]["changed_next"]) for outcome in ranks)
        name = f"ranks that train on after {situation}"
        compare.count(trained_on, name=name, expected=len(ranks), unit="ranks")


@law("AMP-2", reference=GRAD_SCALER)
def test_the_scale_follows_overflow(run: Run, cell: Cell) -> None:
    """The loss scale MUST begin as configured, be halved by each step whose gradients are not finite, which then
    changes no bit, be doubled after the configured number of others, and be the same on every rank.

    Wrong if no scaler is there, if a step with an infinite gradient is taken, or if one is skipped without need.
    """
    record, options = run(cell), trainer_config(cell).loss_scale
    for facts in record.ranks:
        found = [(step.loss_scale, step.skipped) for step in facts.steps]
        skipped = [_overflows(record, step) for step in record.steps]
        expected = list(zip(loss_scales(options, skipped), skipped, strict=True))
        wrong = sum(a != b for a, b in zip(found, expected, strict=True))
        detail = f"rank {facts.rank}: (scale, skipped) are {found}, expected {expected}"
        compare.count(wrong, name="wrong scales", expected=0, detail=detail, unit=f"of {len(found)} steps")
    require_steps_taken(record)
    for step in set(record.steps[:-1]) - set(record.steps_taken):
        before, after = (record.select(f"step{number}/parameter/") for number in (step, step + 1))
        compare.bits(after, before, name=f"parameters after step {step}, which is skipped")


@law("AMP-3", reference=GRAD_SCALER)
def test_scaling_does_not_show_in_gradients(run: Run, cell: Cell) -> None:
    """Gradients of a step that is taken MUST be those of fp32 but for what fp16 rounds and loses, whatever the scale.

    Wrong if gradients are clipped or applied while they are scaled, divided by another scale than the loss was
    multiplied with, or by none.
    """
    config, record = trainer_config(cell), run(cell)
    require_steps_taken(record)
    exact = replace(config, precision="fp32", loss_scale=type(config.loss_scale)())
    for facts in record.ranks[0].steps:
        if facts.skipped:
            continue
        masters = record.select(f"step{facts.step}/parameter/")
        expected = emulated_step(exact, masters, step=facts.step, device=record.device_type).gradients
        compare.tensors(
            record.select(f"step{facts.step}/gradient/"),
            expected,
            name=f"gradient of step {facts.step}, beside fp32",
            within=tolerance.fp16_gradients(config, expected, loss_scale=facts.loss_scale),
        )


def _overflows(record: Record, step: int) -> bool:
    return not all(bool(grad.isfinite().all()) for grad in record.select(f"step{step}/gradient/").values())
