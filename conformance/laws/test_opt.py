"""OPT: which parameters the optimizer trains."""

from collections import Counter

from conformance.judge.law import law
from conformance.laws import compare
from conformance.laws.fixtures import Run
from conformance.oracles.reference import initial_model, learning_rate
from conformance.plan.cells import Cell

FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"


@law("OPT-1", where="implementation = fsdp2", gaps=["large-models"], reference=FULLY_SHARD)
def test_optimizer_holds_the_sharded_parameters(run: Run, cell: Cell) -> None:
    """The optimizer MUST hold exactly the model's sharded parameters, each once, in the group that decays matrices and
    spares norms and biases.

    Wrong if it was built before sharding, or while a group was unsharded: then it trains tensors that are not used.
    """
    config = cell.config
    decay, lr = config.optimizer.weight_decay, _spelled(learning_rate(config, config.steps))
    expected = Counter(
        (name, decay if p.ndim >= 2 else 0.0, lr) for name, p in initial_model(config).named_parameters()
    )
    for facts in run(cell).ranks:
        held = Counter(
            (name, group.weight_decay, _spelled(group.lr))
            for group in facts.optimizer_groups
            for name in group.parameters
        )
        wrong, missing = sorted((held - expected).elements()), sorted((expected - held).elements())
        detail = f"rank {facts.rank} holds {wrong[:3]} and misses {missing[:3]} (name, weight decay, learning rate)"
        unit = f"entries, of {expected.total()}"
        compare.count(len(wrong) + len(missing), name="wrong in the optimizer", expected=0, detail=detail, unit=unit)


def _spelled(rate: float) -> str:
    """Return a learning rate without its last digits, which depend on the formula."""
    return f"{rate:.9g}"
