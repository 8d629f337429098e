"""PAR: a parallel run computes what one process computes."""

from conformance.engine import compare
from conformance.engine.cells import Cell, Mesh
from conformance.engine.law import Run, law
from conformance.engine.outcomes import ConformanceFailure
from conformance.engine.workload import trainer_config
from conformance.instruments.capture import WHOLE
from conformance.oracles import tolerance
from conformance.oracles.cache import fp64_reference
from conformance.oracles.reference import bf16_gradients, replay_updates

FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"


@law("PAR-1", reference=FULLY_SHARD)
def test_sharded_fp32_equals_one_process(run: Run, cell: Cell) -> None:
    """A sharded fp32 run MUST compute the loss, gradients, norms, parameters and optimizer state of one process.

    Wrong if gradients are summed instead of averaged, a partial sum is lost, a norm is local or a shard is stale.
    """
    config = trainer_config(cell)
    record, expected = run(cell), fp64_reference(config)
    bound = tolerance.fp32_gradients(config)
    compare.scalars(record.losses, expected.losses, name="loss", within=bound)
    compare.tensors(record.select("step0/gradient/"), expected.gradients[0], name="gradient at step 0", within=bound)
    compare.scalars(record.grad_norms, expected.grad_norms, name="gradient norm", within=bound)
    compare.tensors(
        record.select("final/parameter/"),
        expected.parameters,
        name="change of parameters",
        origin=expected.initial,
        within=tolerance.updates(bound, expected, config.optimizer),
    )
    for kind, tensors in expected.optimizer_state.items():
        within = tolerance.moments(bound)[kind]
        compare.tensors(record.select(f"final/{kind}/"), tensors, name=f"optimizer state {kind}", within=within)


@law("PAR-2", reference=FULLY_SHARD)
def test_bf16_mixed_precision_equals_its_emulation(run: Run, cell: Cell) -> None:
    """A bf16-mp run MUST round where FSDP2 says it does, and nowhere else: it equals one process with the same casts.

    Wrong if gradients are reduced in bf16, master weights are bf16, or a cast is missing or doubled.
    """
    config, mesh = trainer_config(cell), Mesh.parse(cell.mesh)
    dp_size = mesh.dp_replicate * mesh.dp_shard
    record = run(cell)
    gradients = [record.select(f"step{step}/gradient/") for step in range(cell.steps)]
    for step, measured in enumerate(gradients):
        # Each step is judged from the weights in which it began, so that rounding of earlier steps does not add up.
        weights = record.select(f"step{step}/parameter/")
        loss, expected = bf16_gradients(config, weights, step=step, dp_size=dp_size)
        compare.scalars([record.losses[step]], [loss], name=f"loss {step}", within=tolerance.fp32_loss(config))
        within = tolerance.fp32_average(dp_size)
        compare.tensors(measured, expected, name=f"gradient {step}", within=within)
    initial = record.select("initial/parameter/")
    replayed = replay_updates(config.optimizer, initial, gradients)
    compare.tensors(
        record.select("final/parameter/"),
        replayed.parameters,
        name="change of parameters",
        origin=initial,
        within=tolerance.replayed_updates(replayed, config.optimizer),
    )


@law("PAR-4", reference=FULLY_SHARD)
def test_moving_data_changes_no_bit(run: Run, cell: Cell) -> None:
    """What only moves or repeats (reshard mode, checkpointing) MUST NOT change a bit of gradients or final state.

    Wrong if a group is used before it is gathered, or after it was freed or became stale, or if what activation
    checkpointing computes again comes out otherwise.
    """
    opposite = "always" if cell.reshard != "always" else "never"
    record, other = run(cell), run(cell.but(reshard=opposite, activation_checkpointing="none"))
    for kind in ("step0/gradient/", "final/parameter/", "final/exp_avg/", "final/exp_avg_sq/"):
        compare.bits(record.select(kind), other.select(kind), name=kind)
    assert record.losses == other.losses, f"losses differ: {record.losses} and {other.losses}"


@law("PAR-5", reference=FULLY_SHARD)
def test_replicas_are_equal(run: Run, cell: Cell) -> None:
    """Ranks that hold the same elements of a parameter, gradient, buffer or moment MUST hold the same bits.

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
    coordinates = {tuple(facts.mesh_coordinate.items()) for facts in ranks}
    if len(coordinates) != len(ranks):
        raise ConformanceFailure(f"{len(ranks)} ranks have only {len(coordinates)} mesh coordinates")
