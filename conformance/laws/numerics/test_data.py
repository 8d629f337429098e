"""DATA: the samples on which each rank trains."""

from conformance.assertions import compare
from conformance.assertions.fixtures import Run
from conformance.instruments.capture import fingerprint
from conformance.instruments.facts import RankFacts
from conformance.judge.law import law
from conformance.oracles.reference import Batch
from conformance.oracles.virtual_cp import positions
from conformance.plan.cells import Cell
from conformance.plan.mesh import Mesh
from reference_trainer.data import Batches

DISTRIBUTED_SAMPLER = "https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler"


@law("DATA-1", where="implementation = fsdp2", gaps=["large-models"], reference=DISTRIBUTED_SAMPLER)
def test_each_data_parallel_coordinate_sees_its_samples(run: Run, cell: Cell) -> None:
    """Ranks of one data-parallel coordinate MUST see the same batch, and together the coordinates see each sample of
    the global batch once, in order; ranks that share samples (cp) see the same ones, and the model gets the tokens of
    each rank's two pieces of every sequence.

    Wrong if data is distributed by the rank in the world, if all ranks see the same, or tensor-parallel ranks do not.
    The batches that the trainer takes and the inputs of the model are compared.
    """
    config, mesh = cell.config, Mesh.parse(cell.mesh)
    batches = Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
    record = run(cell)
    steps = [_by_coordinate(batches.global_batch(step), mesh) for step in record.steps]
    for facts in record.ranks:
        at = facts.mesh_coordinate
        coordinate = at.get("dp_replicate", 0) * mesh.dp_shard + at["dp_shard"]
        expected = {
            f"step {step}, {what}": digest
            for step, digests in enumerate(steps)
            for what, digest in digests[coordinate].items()
            if what != "model inputs" or at.get("pp", 0) == 0  # the first stage has the tokens
        }
        measured = _seen(facts)
        wrong = [what for what in expected | measured if measured.get(what) != expected.get(what)]
        detail = f"rank {facts.rank} at data-parallel coordinate {coordinate}: {', '.join(wrong[:4])}"
        compare.count(len(wrong), name="wrong batches", expected=0, detail=detail, unit=f"of {len(expected)}")


def _by_coordinate(batch: Batch, mesh: Mesh) -> list[dict[str, str]]:
    """Return digests of each coordinate's samples, which are consecutive: replicas are the outer index, shards the
    inner, of which `cp` neighbours share samples.
    """
    groups = mesh.dp_replicate * mesh.dp_shard // mesh.cp
    digests = []
    for inputs, labels in zip(*(tensor.chunk(groups) for tensor in batch), strict=True):
        for rank in range(mesh.cp):
            own = inputs if mesh.cp == 1 else inputs[:, positions(inputs.shape[1], cp=mesh.cp, rank=rank)]
            seen = {"inputs": inputs, "labels": labels, "model inputs": own}
            digests.append({what: fingerprint(tokens) for what, tokens in seen.items()})
    return digests


def _seen(facts: RankFacts) -> dict[str, str]:
    batches = {
        f"step {step}, {what}": digest for step, batch in enumerate(facts.batches) for what, digest in batch.items()
    }
    return batches | {f"step {step}, model inputs": digest for step, digest in enumerate(facts.model_inputs)}
