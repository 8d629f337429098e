"""LIFE: sequences of calls over the life of a sharded module."""

from conformance.assertions.fixtures import Measure
from conformance.assertions.sweeps import require_no_wrong_result
from conformance.judge.law import law
from conformance.plan.cells import Cell
from conformance.sweeps.life_cycle import sweep

FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"


@law(
    "LIFE-1",
    where="id in (dp2-fp32-default-meta, dp4-fp32-default-meta, hsdp2x2-fp32-default-meta-seed1)",
    reference=FULLY_SHARD,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_any_sequence_of_calls_equals_plain_torch(measure: Measure, cell: Cell) -> None:
    """A module that FSDP2 has sharded MUST, in any sequence of training, evaluation, freezing, casting, writing,
    loading, copying, prefetching, hooking and failing, of all layers or without one, have the outputs, parameters and
    gradients of the same calls on plain torch, in every bit, communicate in the dtypes of its policy, and hold no more
    memory than its shards; or refuse on all ranks.

    After a failure in forward, loss or backward FSDP2's iteration is reset, and the training starts it again.

    Sequences are drawn by the seed of the cell. The smallest that is wrong, or refused, is reported.
    """
    require_no_wrong_result(measure(sweep, cell), unit="sequences")
