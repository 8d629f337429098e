"""OPT, DATA: what is trained, and on what."""

from collections import Counter

from conformance.instruments.capture import fingerprint
from conformance.instruments.recorder import RankFacts
from conformance.judge.law import Run, law
from conformance.laws import compare
from conformance.oracles.reference import Batch, initial_model
from conformance.plan.cells import Cell, Mesh
from conformance.plan.workload import trainer_config
from reference_trainer.data import Batches

FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
DISTRIBUTED_SAMPLER = "https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler"


@law("OPT-1", reference=FULLY_SHARD)
def test_optimizer_holds_the_sharded_parameters(run: Run, cell: Cell) -> None:
    """The optimizer MUST hold exactly the model's sharded parameters, each once, in the group that decays matrices and
    spares norms and biases.

    Wrong if it was built before sharding, or while a group was unsharded: then it trains tensors that are not used.
    """
    config = trainer_config(cell)
    decay, lr = config.optimizer.weight_decay, config.optimizer.lr
    expected = Counter(
        (name, decay if p.ndim >= 2 else 0.0, lr) for name, p in initial_model(config).named_parameters()
    )
    for facts in run(cell).ranks:
        held = Counter(
            (name, group.weight_decay, group.lr) for group in facts.optimizer_groups for name in group.parameters
        )
        wrong, missing = sorted((held - expected).elements()), sorted((expected - held).elements())
        detail = f"rank {facts.rank} holds {wrong[:3]} and misses {missing[:3]} (name, weight decay, learning rate)"
        unit = f"entries, of {expected.total()}"
        compare.count(len(wrong) + len(missing), name="wrong in the optimizer", expected=0, detail=detail, unit=unit)


@law("DATA-1", reference=DISTRIBUTED_SAMPLER)
def test_each_data_parallel_coordinate_sees_its_share(run: Run, cell: Cell) -> None:
    """Ranks of one data-parallel coordinate MUST see the same batch, and together the coordinates see each sample of
    the global batch once, in order.

    Wrong if data is distributed by the rank in the world, if all ranks see the same, or tensor-parallel ranks do not.
    Both what the trainer takes and what the model is called with is compared.
    """
    config, mesh = trainer_config(cell), Mesh.parse(cell.mesh)
    batches = Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
    shares = [_shares(batches.global_batch(step), mesh) for step in range(cell.steps)]
    for facts in run(cell).ranks:
        at = facts.mesh_coordinate
        coordinate = at.get("dp_replicate", 0) * mesh.dp_shard + at["dp_shard"]
        expected = {f"step {step}, {what}": d for step, one in enumerate(shares) for what, d in one[coordinate].items()}
        measured = _seen(facts)
        wrong = [what for what in expected | measured if measured.get(what) != expected.get(what)]
        detail = f"rank {facts.rank} at data-parallel coordinate {coordinate}: {', '.join(wrong[:4])}"
        compare.count(len(wrong), name="wrong batches", expected=0, detail=detail, unit=f"of {len(expected)}")


def _shares(batch: Batch, mesh: Mesh) -> list[dict[str, str]]:
    """Digests of consecutive samples for each coordinate: replicas are the outer index, shards the inner."""
    inputs, labels = (tensor.chunk(mesh.dp_replicate * mesh.dp_shard) for tensor in batch)
    tokens = [fingerprint(part) for part in inputs]
    return [
        {"inputs": own, "labels": fingerprint(part), "model inputs": own}
        for own, part in zip(tokens, labels, strict=True)
    ]


def _seen(facts: RankFacts) -> dict[str, str]:
    batches = {f"step {step}, {what}": d for step, batch in enumerate(facts.batches) for what, d in batch.items()}
    return batches | {f"step {step}, model inputs": digest for step, digest in enumerate(facts.model_inputs)}
