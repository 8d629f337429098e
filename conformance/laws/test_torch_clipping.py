"""CLIP: torch's own clipping, of sharded gradients, as those use it who do not clip like the reference trainer."""

import math

from conformance.experiments.torch_clipping import AMPLIFICATION, AMPLIFIED
from conformance.judge.law import Measure, Run, law
from conformance.laws import compare
from conformance.oracles import tolerance
from conformance.oracles.reference import clip_factor, total_norm
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from conformance.plan.workload import trainer_config

CLIP_GRAD_NORM = "https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html"
CLIP_GRAD_VALUE = "https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_value_.html"


@law("CLIP-4", reference=CLIP_GRAD_NORM)
def test_torch_clips_by_the_full_norm(run: Run, measure: Measure, cell: Cell) -> None:
    """torch.nn.utils.clip_grad_norm_ MUST scale sharded gradients by their full norm and return it: as `full_tensor()`,
    and on every rank as the number that `item()` gives.

    Wrong on every rank but one if the norm that is returned was never reduced.
    """
    config, gradients = trainer_config(cell), run(cell).select("step0/gradient/")
    order = config.optimizer.norm_order
    if order == math.inf:
        gradients[AMPLIFIED] = gradients[AMPLIFIED] * AMPLIFICATION
    norm = total_norm(gradients.values(), order=order)
    ranks = measure("torch_clipping:clip_with_torch", cell)
    factors = [clip_factor(norm, max_norm=config.optimizer.max_norm)] * len(ranks)
    rounding = max(tolerance.clipping(gradients, order=order).values())
    compare.scalars([found["factor"] for found in ranks], factors, name="factor", within=rounding, each="rank")
    unevenness = max(found["unevenness"] for found in ranks)
    compare.between(unevenness, 0.0, rounding, name="unevenness", detail="scaled gradients", unit="relative deviation")
    norms, within = [norm] * len(ranks), tolerance.norm(gradients, order=order)
    compare.scalars([found["full"] for found in ranks], norms, name="full_tensor()", within=within, each="rank")
    compare.scalars([found["item"] for found in ranks], norms, name="item()", within=within, each="rank")


@law("CLIP-6", reference=CLIP_GRAD_NORM, since="2.13")
def test_torch_raises_on_every_rank(measure: Measure, cell: Cell) -> None:
    """torch.nn.utils.clip_grad_norm_ with `error_if_nonfinite` MUST raise an error on every rank if a gradient has a
    NaN or an infinity anywhere, and change nothing then; without, it MUST raise none, and return a norm that tells.

    Wrong if only the rank that holds the number raises: the others wait for it in their next collective.
    """
    ranks = measure("torch_clipping:clip_what_is_not_finite_with_torch", cell)
    wrong = []
    for situation in ranks[0]:
        asked = situation.startswith("raise/")
        for rank, found in enumerate(outcome[situation] for outcome in ranks):
            if found["raised"] != asked or found["is_finite"] or (asked and found["changed"]):
                wrong.append(f"{situation} on rank {rank}: {found}")
    situations = len(ranks) * len(ranks[0])
    compare.count(len(wrong), name="wrong outcomes", expected=0, detail="; ".join(wrong[:4]), unit=f"of {situations}")


@law("CLIP-7", reference=CLIP_GRAD_VALUE, since="2.13")
def test_torch_clips_values(measure: Measure, cell: Cell) -> None:
    """torch.nn.utils.clip_grad_value_ MUST bring each element of sharded gradients into [-value, value], and change no
    bit of an element that is there.
    """
    ranks = measure("torch_clipping:clip_values_with_torch", cell)
    for kind in ("outside", "inside"):
        if not sum(found[kind] for found in ranks):
            raise ConformanceFailure(f"no rank has an element of a gradient {kind} the limit: nothing to judge")
    for rank, found in enumerate(ranks):
        compare.count(found["wrong"], name="wrong elements", expected=0, detail=f"rank {rank}", unit="elements")
