"""PAR: a parallel run computes what one process computes, in fp32 and in bf16."""

import torch

from conformance.judge.law import Probe, Run, law
from conformance.judge.measurements import measure
from conformance.laws import compare
from conformance.laws.steps import compare_steps, compare_updates, require_known_sum_order
from conformance.oracles import tolerance
from conformance.oracles.cache import reference_run
from conformance.oracles.emulation import emulated_step
from conformance.oracles.reference import initial_model
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from conformance.plan.workload import trainer_config
from reference_trainer.data import Batches
from reference_trainer.integer_model import EXACT_BELOW, largest_partial_sum

FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
MIXED_PRECISION = f"{FULLY_SHARD}#torch.distributed.fsdp.MixedPrecisionPolicy"


@law("PAR-1", reference=FULLY_SHARD)
def test_sharded_fp32_equals_one_process(run: Run, cell: Cell) -> None:
    """A sharded fp32 run MUST compute the loss, gradients, norms, parameters and optimizer state of one process.

    Wrong if gradients are summed instead of averaged, a partial sum is lost, a norm is local or a shard is stale.
    One process in fp64 is the reference, and in fp32 shows that the bound leaves room for rounding alone.
    """
    config = trainer_config(cell)
    record, expected = run(cell), reference_run(config, dtype=torch.float64)
    bound = tolerance.fp32_gradients(config)
    own = reference_run(config, dtype=torch.float32).gradients[0]
    compare.tensors(own, expected.gradients[0], name="own error of one process in fp32", within=bound)
    compare.tensors(record.select("step0/gradient/"), expected.gradients[0], name="gradient at step 0", within=bound)
    compare_steps(record)
    condition = tolerance.norm_condition(expected.gradients[0], order=config.optimizer.norm_order)
    compare.scalars(record.grad_norms, expected.grad_norms, name="gradient norm", within=bound * condition)
    compare.tensors(
        record.select("final/parameter/"),
        expected.parameters,
        name="change of parameters",
        origin=expected.initial,
        within=tolerance.updates(bound, expected, config.optimizer),
    )
    for kind, tensors in expected.optimizer_state.items():
        within = tolerance.moments(bound, expected, config.optimizer)[kind]
        compare.tensors(record.select(f"final/{kind}/"), tensors, name=f"optimizer state {kind}", within=within)
    compare.scalars(record.losses, expected.losses, name="loss", within=bound)  # last: tensors show faults more clearly


@law("PAR-2", reference=MIXED_PRECISION)
def test_mixed_precision_equals_its_emulation(run: Run, probe: Probe, cell: Cell) -> None:
    """A bf16 or fp16 run MUST round where FSDP2 and tensor parallelism say it does, and nowhere else: as one process
    does with the same casts and partial sums.

    Wrong if gradients are reduced in bf16, master weights are bf16, or a cast is missing or doubled. In fp16 each step
    is computed with the loss scale that it reports: what is too small for fp16 is lost where the emulation loses it.
    """
    require_known_sum_order(probe, cell)
    record = run(cell)
    compare_steps(record)
    compare_updates(record)


@law("PAR-3", reference=MIXED_PRECISION)
def test_mixed_precision_is_as_far_from_fp32_as_it_has_to_be(run: Run, cell: Cell) -> None:
    """A bf16 or fp16 run's gradients MUST be no further from fp32 than those of one process that rounds alike, and no
    closer.

    Wrong if something is rounded more often than it has to be, or if bf16 did not run at all.
    """
    config = trainer_config(cell)
    record, exact = run(cell), reference_run(config, dtype=torch.float64).gradients[0]
    initial = record.select("initial/parameter/")
    scale = record.ranks[0].steps[0].loss_scale
    emulated = emulated_step(config, initial, step=0, loss_scale=scale, device=record.device_type).gradients
    errors = [compare.distance(found, exact) for found in (record.select("step0/gradient/"), emulated)]
    compare.ratio(*errors, name="error over that of the emulation", factor=tolerance.bf16_error_factor(config))


@law("PAR-7", reference=FULLY_SHARD)
def test_uneven_shards_and_tied_weights_train(run: Run, cell: Cell) -> None:
    """Shards of unequal sizes, empty ones and tied weights MUST be trained like any other, in every step.

    Wrong if padding gets into a tensor, a row belongs to no rank or to two, the rows of the last rank are stale, or a
    tied weight becomes two.
    """
    record = run(cell)
    names = {name for name, _ in initial_model(trainer_config(cell)).named_parameters()}
    for when in ("initial", "final"):
        found = record.select(f"{when}/parameter/").keys()
        if found != names:
            raise ConformanceFailure(f"{when} parameters: {sorted(found ^ names)} are not those of one process")
    wrong = [name for name in names if not record.is_partitioned(name)]
    compare.count(len(wrong), name="wrong partitions", expected=0, detail=", ".join(wrong), unit="parameters")
    compare_steps(record)
    compare_updates(record)


@law("PAR-9", reference=FULLY_SHARD)
def test_whole_numbers_are_exact_on_every_mesh(run: Run, cell: Cell) -> None:
    """With whole numbers, whose sums are exact in any order, a run MUST equal one process in every bit on any mesh.

    Wrong by the smallest error of scale, order or layout: there is no rounding that could hide it.
    """
    config = trainer_config(cell)
    record, expected = run(cell), reference_run(config, dtype=torch.float64)
    batch = Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed).global_batch(0)
    largest = largest_partial_sum(initial_model(config), *batch)
    measure("largest partial sum", largest, upper=EXACT_BELOW, unit="one")
    assert largest < EXACT_BELOW, f"the workload is not exact: a partial sum may reach {largest}"
    assert record.losses == expected.losses, f"losses: measured {record.losses}, expected {expected.losses}"
    compare.bits(record.select("step0/gradient/"), _fp32(expected.gradients[0]), name="gradient")
    compare.bits(record.select("final/parameter/"), _fp32(expected.parameters), name="parameters")


def _fp32(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in tensors.items()}
