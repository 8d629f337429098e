"""MP-2: the ways to build a mixed-precision model end in the same state, but for the weights that they start from."""

import torch
from torch import Tensor

from conformance.judge.law import Probe, Run, law
from conformance.laws import compare
from conformance.laws.steps import compare_steps, compare_updates, require_known_sum_order
from conformance.oracles.reference import initial_model
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from conformance.plan.workload import trainer_config

FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"


@law("MP-2", reference=FULLY_SHARD)
def test_ways_to_build_differ_in_starting_weights_alone(run: Run, probe: Probe, cell: Cell) -> None:
    """Built in fp32, or in bf16 and cast to fp32 after `fully_shard`, drawn or loaded, a model MUST start from the
    weights that its way implies, train in the same dtypes, and compute what follows from those weights.

    Wrong if the cast leaves bf16 behind, the optimizer holds the tensors from before it, a load skips or rounds a
    tensor, or all-gathers still serve what was there before.
    """
    require_known_sum_order(probe, cell)
    record, plain = run(cell), run(cell.but(precision="bf16-mp", init="meta"))
    parameters = initial_model(trainer_config(cell)).named_parameters()
    start = {name: _stored(parameter.detach(), cell) for name, parameter in parameters}
    compare.bits(record.select("initial/parameter/"), start, name="starting weights")
    for facts, expected in zip(record.ranks, plain.ranks, strict=True):
        if facts.dtypes != expected.dtypes:
            differing = sorted(key for key in expected.dtypes if facts.dtypes.get(key) != expected.dtypes[key])
            raise ConformanceFailure(f"rank {facts.rank}: other dtypes than built in fp32: {differing[:5]}")
    compare_steps(record)
    compare_updates(record)


def _stored(drawn: Tensor, cell: Cell) -> Tensor:
    """A weight as the way to build leaves it: through bf16, or as it was drawn."""
    return drawn.to(torch.bfloat16).float() if cell.precision == "bf16-init" else drawn
