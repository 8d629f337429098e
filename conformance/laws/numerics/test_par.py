"""PAR: a parallel run computes the step of one process, with any movement of data, in fp32 and in bf16."""

import msgspec
import torch
from torch import Tensor

from conformance.assertions import compare
from conformance.assertions.dropout import masks_recomputed_differently, recorded_masks, repeated_masks
from conformance.assertions.fixtures import Measure, Run
from conformance.assertions.steps import compare_steps, compare_updates, emulation_of, require_known_sum_order
from conformance.judge.law import law
from conformance.judge.measurements import measure as report
from conformance.oracles import optimizer_tolerance, tolerance
from conformance.oracles.reference import initial_model, reference_run
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell, axis_default
from conformance.plan.mesh import Mesh
from conformance.run.record import Record
from reference_trainer.data import Batches
from reference_trainer.integer_model import EXACT_BELOW, largest_partial_sum

FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
MIXED_PRECISION = f"{FULLY_SHARD}#torch.distributed.fsdp.MixedPrecisionPolicy"
GRADIENT_SYNC = f"{FULLY_SHARD}#torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync"
DROPOUT = "https://docs.pytorch.org/docs/stable/generated/torch.nn.Dropout.html"
RANDOMNESS = "https://docs.pytorch.org/docs/stable/notes/randomness.html"


@law(
    "PAR-1",
    where="precision = fp32 and float8 = none and implementation = fsdp2",
    gaps=["resumed", "integer-model", "large-models"],
    numbers=True,
    reference=FULLY_SHARD,
)
def test_sharded_fp32_equals_one_process(run: Run, cell: Cell) -> None:
    """A sharded fp32 run MUST compute the loss, gradients, norms, parameters and optimizer state of one process.

    Wrong if gradients are summed instead of averaged, a partial sum is lost, a norm is local or a shard is stale.
    One process in fp64 is the reference, and in fp32 shows that the bound leaves room for rounding alone.
    """
    config = cell.config
    record = run(cell)
    masks = recorded_masks(record)
    expected = reference_run(config, dtype=torch.float64, masks=masks)
    bound, reference = tolerance.fp32_gradients(config), expected.gradients[0]
    single = reference_run(config, dtype=torch.float32, masks=masks).gradients[0]
    compare.tensors(single, reference, name="own error of one process in fp32", within=bound)
    compare.tensors(record.select("step0/gradient/"), reference, name="gradient at step 0", within=bound)
    compare_steps(record)
    norm_bound = tolerance.gradient_norm(bound, reference, order=config.optimizer.norm_order)
    compare.scalars(record.grad_norms, expected.grad_norms, name="gradient norm", within=norm_bound)
    compare.tensors(
        record.select("final/parameter/"),
        expected.parameters,
        name="change of parameters",
        origin=expected.initial,
        within=optimizer_tolerance.updates(bound, expected, config.optimizer),
    )
    for kind, tensors in expected.optimizer_state.items():
        within = optimizer_tolerance.moments(bound, expected, config.optimizer)[kind]
        compare.tensors(record.select(f"final/{kind}/"), tensors, name=f"optimizer state {kind}", within=within)
    compare.scalars(record.losses, expected.losses, name="loss", within=bound)  # last: tensors show faults more clearly


@law(
    "PAR-2",
    where="(precision != fp32 or float8 != none) and implementation = fsdp2",
    gaps=["resumed", "large-models"],
    numbers=True,
    reference=MIXED_PRECISION,
)
def test_mixed_precision_equals_its_emulation(run: Run, measure: Measure, cell: Cell) -> None:
    """A bf16, fp16 or float8 run MUST round exactly where FSDP2, tensor parallelism and torchao document it: as one
    process does with the same casts, scales and partial sums.

    Wrong if gradients are reduced in bf16, master weights are bf16, a cast is missing or doubled, or a float8 scale is
    stale or that of a shard. In fp16 each step
    is computed with the loss scale that it reports, so that both underflow at the same points.
    """
    require_known_sum_order(measure, cell)
    record = run(cell)
    compare_steps(record)
    compare_updates(record)


@law(
    "PAR-3",
    where="(precision != fp32 or float8 != none) and implementation = fsdp2",
    gaps=["resumed", "16-bit-factor", "skipped-first-step", "compiled-roundings", "large-models"],
    reference=MIXED_PRECISION,
)
def test_mixed_precision_error_equals_that_of_its_emulation(run: Run, cell: Cell) -> None:
    """The error of a bf16, fp16 or float8 run's gradients against fp32 MUST equal that of an emulation with the same
    rounding points, within a two-sided bound.

    Wrong if something is rounded more often than necessary, or if bf16 did not run at all.
    """
    config = cell.config
    record = run(cell)
    exact = reference_run(config, dtype=torch.float64, masks=recorded_masks(record)).gradients[0]
    emulated = emulation_of(record, 0).gradients
    errors = [compare.distance(gradients, exact) for gradients in (record.select("step0/gradient/"), emulated)]
    compare.ratio(*errors, name="error over that of the emulation", factor=tolerance.bf16_error_factor(config))


@law(
    "PAR-4",
    where="implementation = fsdp2 and (reshard != default or forward_prefetch > 0 or backward_prefetch > 0 "
    "or activation_checkpointing != none or evaluation != none) "
    "and pipeline not in (interleaved-zero-bubble, zbv-zero-bubble)",
    gaps=["rerun-cost-combined", "large-models"],
    numbers=True,
    reference=FULLY_SHARD,
)
def test_reshard_prefetch_and_checkpointing_change_no_bit(run: Run, cell: Cell) -> None:
    """Settings that only move or repeat (reshard mode, prefetching, activation checkpointing), and evaluations between
    micro-batches, MUST NOT change a bit of gradients or final state.

    Wrong if a group is used before it is all-gathered, or after it was freed or became stale, or if activation
    checkpointing recomputes other values, or an evaluation draws random numbers or leaves gradients.
    """
    opposite = "always" if cell.reshard != "always" else "never"
    plain = cell.but(
        reshard=opposite,
        forward_prefetch=0,
        backward_prefetch=0,
        activation_checkpointing="none",
        evaluation="none",
    )
    record = run(cell)
    if record.config.compile == "inductor":  # rounds otherwise where it recomputes; PAR-1 and PAR-2 judge its gradients
        plain = plain.but(activation_checkpointing=cell.activation_checkpointing)
    _require_same_bits(record, run(plain))


@law("PAR-5", where="world > 1", gaps=["large-models"], reference=FULLY_SHARD)
def test_replicas_are_equal(run: Run, cell: Cell) -> None:
    """Ranks that hold the same elements of a parameter, gradient, buffer or moment MUST hold the same bits, and all
    ranks must report the same loss and norm.

    Wrong if a replica starts from other weights, or a replicated parameter's gradient stays a partial sum.
    """
    record = run(cell)
    ranks, unequal = record.ranks, record.unequal_copies
    detail = ", ".join(f"rank {rank}: {key}" for key, rank in unequal[:8])
    unit = "shards that differ from those of another rank"
    compare.count(len(unequal), name="differing tensors", expected=0, detail=detail, unit=unit)
    for facts in ranks:
        if facts.steps != ranks[0].steps:
            raise ConformanceFailure(f"rank {facts.rank} reports {facts.steps}, rank 0 {ranks[0].steps}")
    coordinates = {tuple(facts.mesh_coordinate.items()) for facts in ranks}
    if len(coordinates) != len(ranks):
        raise ConformanceFailure(f"{len(ranks)} ranks have only {len(coordinates)} mesh coordinates")


@law(
    "PAR-6",
    # Eight micro-batches of four ranks are more samples than the usual batch, which a run without micro-batches has.
    # A block that some micro-batches leave out computes other samples in a run without micro-batches.
    where="accumulation > 1 and (accumulation < 8 or dp <= 3) and skipped = none and implementation = fsdp2",
    gaps=["16-bit-micro-batches", "second-run", "masks-of-micro-batches", "balance-of-micro-batches", "large-models"],
    numbers=True,
    reference=GRADIENT_SYNC,
)
def test_gradient_accumulation_equals_one_large_batch(run: Run, cell: Cell) -> None:
    """Micro-batches of unequal numbers of valid tokens MUST add up to the gradients and updates of one large batch,
    whether gradients are reduced after each or after the last, and whether or not they pass through a pipeline.

    Wrong if a micro-batch overwrites the others, counts by its own number of tokens, or is left out of a reduction.
    """
    config = cell.config
    record, single = run(cell), run(_with_one_batch(cell))
    bound = tolerance.both(tolerance.fp32_gradients(config))
    gradients = single.select("step0/gradient/")
    compare.tensors(record.select("step0/gradient/"), gradients, name="gradient at step 0", within=bound)
    norm_bound = tolerance.gradient_norm(bound, gradients, order=config.optimizer.norm_order)
    compare.scalars(record.grad_norms, single.grad_norms, name="gradient norm", within=norm_bound)
    compare.tensors(
        record.select("final/parameter/"),
        single.select("final/parameter/"),
        name="change of parameters",
        origin=single.select("initial/parameter/"),
        within=optimizer_tolerance.updates(bound, reference_run(config, dtype=torch.float64), config.optimizer),
    )
    compare.scalars(record.losses, single.losses, name="loss", within=bound)


def _with_one_batch(cell: Cell) -> Cell:
    """Return the cell without micro-batches, and so without a pipeline."""
    mesh = msgspec.structs.replace(Mesh.parse(cell.mesh), pp=1)
    return cell.but(
        mesh=mesh.name,
        accumulation=1,
        passes=1,
        gradient_sync="each",
        evaluation="none",
        pipeline=axis_default("pipeline"),
    )


@law(
    "PAR-7",
    where="(model in (uneven, uneven-tp, even) or tied_embeddings = true) and implementation = fsdp2",
    gaps=["resumed", "large-models"],
    numbers=True,
    reference=FULLY_SHARD,
)
def test_uneven_shards_and_tied_weights_train(run: Run, measure: Measure, cell: Cell) -> None:
    """Shards of unequal sizes, empty ones and tied weights MUST be trained like any other, in every step.

    Wrong if padding gets into a tensor, a row belongs to no rank or to two, the rows of the last rank are stale, or a
    tied weight becomes two.
    """
    require_known_sum_order(measure, cell)
    record = run(cell)
    names = {name for name, _ in initial_model(cell.config).named_parameters()}
    for when in ("initial", "final"):
        recorded = record.select(f"{when}/parameter/").keys()
        if recorded != names:
            raise ConformanceFailure(f"{when} parameters: {sorted(recorded ^ names)} are not those of one process")
    wrong = [name for name in names if not record.is_partitioned(name)]
    compare.count(len(wrong), name="wrong partitions", expected=0, detail=", ".join(wrong), unit="parameters")
    compare_steps(record)
    compare_updates(record)


@law("PAR-8", where="world >= 1", gaps=["repetition", "large-models"], numbers=True, own_run=True, reference=RANDOMNESS)
def test_repeated_run_is_bitwise_equal(run: Run, cell: Cell) -> None:
    """Two runs of a cell MUST be equal in every bit, and issue the same collectives.

    Wrong if anything depends on time, memory or another run: uninitialised memory, a race, an unseeded sample.
    """
    record, again = run(cell), run(cell, repeat=1)
    _require_same_bits(record, again)
    for first, second in zip(record.ranks, again.ranks, strict=True):
        if first.collectives != second.collectives:
            raise ConformanceFailure(f"rank {first.rank} issued other collectives in the second run")


@law("PAR-9", where="model = integer", gaps=["float-model"], numbers=True, reference=FULLY_SHARD)
def test_integer_model_is_exact_on_every_mesh(run: Run, cell: Cell) -> None:
    """A run on integers, whose sums are exact in any order, MUST equal one process in every bit on any mesh.

    Wrong by the smallest error of scale, order or layout: there is no rounding that could hide it.
    """
    config = cell.config
    record, expected = run(cell), reference_run(config, dtype=torch.float64)
    batch = Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed).global_batch(0)
    largest = largest_partial_sum(initial_model(config), *batch)
    report("largest partial sum", largest, kind="exact", upper=EXACT_BELOW, unit="one")
    assert largest < EXACT_BELOW, f"the workload is not exact: a partial sum may reach {largest}"
    assert record.losses == expected.losses, f"losses: measured {record.losses}, expected {expected.losses}"
    compare.bits(record.select("step0/gradient/"), _fp32(expected.gradients[0]), name="gradient")
    compare.bits(record.select("final/parameter/"), _fp32(expected.parameters), name="parameters")


@law("PAR-10", where="dropout > 0.0 and skipped = none", gaps=["large-models"], reference=DROPOUT)
def test_dropout_masks_are_equal_where_activations_are(run: Run, cell: Cell) -> None:
    """Dropout masks MUST be Bernoulli(p); identical on tensor-parallel replicas and in recomputation; independent
    across layers, micro-batches, steps, and ranks with different activations.

    Wrong if ranks share a seed, or do not where they must, or if the generator's state is not kept for recomputation.
    That kept elements are rescaled is judged by the laws on numbers, whose oracles replay the masks.
    """
    record = run(cell)
    masks = recorded_masks(record)
    assert masks is not None
    repeated = [f"{again} as in {first}" for again, first in repeated_masks(record, record.steps)]
    _require_none(repeated, name="repeated masks")
    otherwise = [str(place) for place in masks_recomputed_differently(record)]
    _require_none(otherwise, name="other masks in recomputation")
    kept = torch.cat([mask.flatten() for step in record.steps for mask in masks.of(step)])
    share, within = 1.0 - float(kept.double().mean()), tolerance.dropped_share(cell.dropout, samples=kept.numel())
    if abs(share - cell.dropout) > within:
        raise ConformanceFailure(f"a share of {share:.4f} is dropped, expected {cell.dropout} within {within:.4f}")


def _require_none(wrong: list[str], *, name: str) -> None:
    __tracebackhide__ = True
    compare.count(len(wrong), name=name, expected=0, detail=", ".join(wrong[:4]), unit="masks")


def _fp32(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in tensors.items()}


def _require_same_bits(record: Record, other: Record) -> None:
    __tracebackhide__ = True
    kinds = sorted({key.rsplit("/", 1)[0] for key in record.ranks[0].fingerprints})
    for kind in kinds:
        compare.bits(record.select(f"{kind}/"), other.select(f"{kind}/"), name=kind)
    if record.losses != other.losses or record.grad_norms != other.grad_norms:
        raise ConformanceFailure(f"losses differ: {record.losses} and {other.losses}, or gradient norms")
