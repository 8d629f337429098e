"""PAR: what must not change the result of a run, and what must be equal within it."""

import torch

from conformance.instruments.capture import WHOLE
from conformance.judge.law import Run, law
from conformance.laws import compare
from conformance.oracles import tolerance
from conformance.oracles.cache import reference_run
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from conformance.plan.workload import trainer_config
from conformance.run.record import Record

FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
RANDOMNESS = "https://docs.pytorch.org/docs/stable/notes/randomness.html"
GRADIENT_SYNC = f"{FULLY_SHARD}#torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync"


@law("PAR-4", reference=FULLY_SHARD)
def test_moving_data_changes_no_bit(run: Run, cell: Cell) -> None:
    """What only moves or repeats (reshard mode, prefetching, checkpointing) MUST NOT change a bit of gradients or final
    state.

    Wrong if a group is used before it is gathered, or after it was freed or became stale, or if what activation
    checkpointing computes again comes out otherwise.
    """
    opposite = "always" if cell.reshard != "always" else "never"
    plain = cell.but(reshard=opposite, forward_prefetch=0, backward_prefetch=0, activation_checkpointing="none")
    _require_same_bits(run(cell), run(plain))


@law("PAR-5", reference=FULLY_SHARD)
def test_replicas_are_equal(run: Run, cell: Cell) -> None:
    """Ranks that hold the same elements of a parameter, gradient, buffer or moment MUST hold the same bits, and all
    ranks must report the same loss and norm.

    Wrong if a replica starts from other weights, or a replicated parameter's gradient stays a partial sum.
    """
    ranks = run(cell).ranks
    first: dict[tuple[str, str], str] = {}
    differing = []
    for facts in ranks:
        for key, found in facts.fingerprints.items():
            _, kind, name = key.split("/", 2)
            layout = WHOLE if kind == "gathered" else facts.layouts.get(name, WHOLE)
            if first.setdefault((key, layout), found) != found:
                differing.append(f"rank {facts.rank}: {key}")
    compare.count(
        len(differing),
        name="differing tensors",
        expected=0,
        detail=", ".join(differing[:8]),
        unit=f"parts that differ from those of another rank, of {len(first)}",
    )
    for facts in ranks:
        if facts.steps != ranks[0].steps:
            raise ConformanceFailure(f"rank {facts.rank} reports {facts.steps}, rank 0 {ranks[0].steps}")
    coordinates = {tuple(facts.mesh_coordinate.items()) for facts in ranks}
    if len(coordinates) != len(ranks):
        raise ConformanceFailure(f"{len(ranks)} ranks have only {len(coordinates)} mesh coordinates")


@law("PAR-6", reference=GRADIENT_SYNC)
def test_accumulation_equals_one_large_batch(run: Run, cell: Cell) -> None:
    """Micro-batches of unequal numbers of valid tokens MUST add up to the gradients and updates of one large batch,
    whether gradients are reduced after each or after the last.

    Wrong if a micro-batch overwrites the others, counts by its own number of tokens, or is left out of a reduction.
    """
    config = trainer_config(cell)
    record, whole = run(cell), run(cell.but(accumulation=1, gradient_sync="each"))
    bound = 2 * tolerance.fp32_gradients(config)  # both are computations with rounding
    gradients = whole.select("step0/gradient/")
    compare.tensors(record.select("step0/gradient/"), gradients, name="gradient at step 0", within=bound)
    condition = tolerance.norm_condition(gradients, order=config.optimizer.norm_order)
    compare.scalars(record.grad_norms, whole.grad_norms, name="gradient norm", within=bound * condition)
    compare.tensors(
        record.select("final/parameter/"),
        whole.select("final/parameter/"),
        name="change of parameters",
        origin=whole.select("initial/parameter/"),
        within=tolerance.updates(bound, reference_run(config, dtype=torch.float64), config.optimizer),
    )
    compare.scalars(record.losses, whole.losses, name="loss", within=bound)


@law("PAR-8", reference=RANDOMNESS)
def test_a_repeated_run_is_equal(run: Run, cell: Cell) -> None:
    """Two runs of a cell MUST be equal in every bit, and issue the same collectives.

    Wrong if anything depends on time, memory or another run: uninitialised memory, a race, an unseeded draw.
    """
    record, again = run(cell), run(cell, repeat=1)
    _require_same_bits(record, again)
    for first, second in zip(record.ranks, again.ranks, strict=True):
        if first.collectives != second.collectives:
            raise ConformanceFailure(f"rank {first.rank} issued other collectives in the second run")


def _require_same_bits(record: Record, other: Record) -> None:
    __tracebackhide__ = True
    kinds = sorted({key.rsplit("/", 1)[0] for key in record.ranks[0].fingerprints})
    for kind in kinds:
        compare.bits(record.select(f"{kind}/"), other.select(f"{kind}/"), name=kind)
    if record.losses != other.losses or record.grad_norms != other.grad_norms:
        raise ConformanceFailure(f"losses differ: {record.losses} and {other.losses}, or gradient norms")
