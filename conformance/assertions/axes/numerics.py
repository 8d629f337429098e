"""Proofs that precision, loss scaling and TF32 take effect, from the records of a cell and of its neighbour."""

import torch

from conformance.assertions.axes.differences import expect, same
from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.torch_versions import traits_of
from conformance.plan.mesh import Mesh
from conformance.run.record import Record
from reference_trainer.precision import PRECISIONS

_PASSES = ("data", "forward", "backward")
"""Phases in which FSDP communicates; in `data` a rank with several stages of a pipeline gathers ahead."""


def precision_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless weights, products and reductions of both have the dtypes of their precisions."""
    for run in (record, neighbour):
        policy = dtype_policy(run.cell.precision)
        in_bf16 = run.cell.precision == "bf16-init"
        several, traits = Mesh.parse(run.cell.mesh).dp_shard > 1, traits_of(run.header.torch)
        expected = {
            "matrix products": {policy.compute},
            "all-gathers": {policy.compute} if several or traits.one_rank_gathers else set(),
            "reduce-scatters": {policy.reduce} if several or traits.one_rank_reduces else set(),
            "norms": {policy.sharded_norms},
            "other parameters": {policy.sharded},
            "fp32 weights begin as bf16 numbers": {str(in_bf16)},
            "the loss is scaled": {str(PRECISIONS[run.cell.precision].scales_loss)},
        }
        measured = _dtypes(run)
        wrong = {what: sorted(dtypes) for what, dtypes in measured.items() if dtypes != expected[what]}
        expect(not wrong, f"{run.cell.id}: {wrong}, expected { ({what: sorted(expected[what]) for what in wrong}) }")


def _dtypes(record: Record) -> dict[str, set[str]]:
    facts = record.ranks[0]
    initial = {key.partition("/")[2]: set(names) for key, names in facts.dtypes.items() if key.startswith("initial_p")}
    weights = [weight for weight in record.select("initial/parameter/").values() if weight.dtype == torch.float32]
    sent = {
        kind: {e.dtype for e in facts.collectives if (e.kind, e.group) == (kind, "dp_shard") and e.phase in _PASSES}
        for kind in ("all_gather", "reduce_scatter")
    }
    return {
        "matrix products": set(facts.dtypes.get("matmul/forward", [])),
        "all-gathers": sent["all_gather"],
        "reduce-scatters": sent["reduce_scatter"],
        "norms": set().union(*(dtypes for name, dtypes in initial.items() if "norm" in name)),
        "other parameters": set().union(*(dtypes for name, dtypes in initial.items() if "norm" not in name)),
        "fp32 weights begin as bf16 numbers": {str(all(bool((w.bfloat16() == w).all()) for w in weights))},
        "the loss is scaled": {str(step.loss_scale != 1.0) for step in facts.steps},
    }


def loss_scale_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless steps are skipped that the neighbour takes.

    The neighbour may skip steps of a larger scale: in long runs it grows until gradients overflow.
    """
    skipped, usual = ([step.loss_scale for step in run.ranks[0].steps if step.skipped] for run in (record, neighbour))
    fits = neighbour.config.loss_scale.initial
    expect(bool(skipped), "no step is skipped")
    expect(all(scale > fits for scale in usual), f"steps with scales {usual} are skipped, although {fits} fits")


def tf32_takes_effect(record: Record, neighbour: Record) -> None:
    """Raise ConformanceFailure unless gradients from the same weights differ from those of the neighbour."""
    expect(same(record, neighbour, "initial/parameter/"), "initial weights differ")
    expect(not same(record, neighbour, "step0/gradient/"), "gradients are the same in every bit with TF32 and without")
