"""CP: context parallelism, ring attention over shards of the sequence."""

from conformance.assertions.fixtures import Measure
from conformance.assertions.sweeps import require_no_wrong_result
from conformance.judge.law import law
from conformance.plan.cells import Cell
from conformance.sweeps.context_parallel import sweep

CONTEXT_PARALLEL = "https://docs.pytorch.org/tutorials/unstable/context_parallel.html"


@law(
    "CP-1",
    where="id in (dp2-fp32-default-meta-even, dp3-fp32-default-meta, hsdp2x2-fp32-default-meta-seed1)",
    reference=CONTEXT_PARALLEL,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_ring_attention_equals_one_process(measure: Measure, cell: Cell) -> None:
    """Attention inside `context_parallel` MUST have the outputs and gradients of one process, for each kernel, order of
    tokens, dtype and way of passing keys, give ranks equal shards of all buffers, and leave buffers and attention
    outside as they were; or refuse on all ranks.

    Within a derived bound. Any two options, on four ranks any three. The CPU's kernels are stand-ins, so that
    the law judges what torch does around them: rings, merges, orders of tokens, gradients and the context itself.
    """
    require_no_wrong_result(measure(sweep, cell), unit="attention")
