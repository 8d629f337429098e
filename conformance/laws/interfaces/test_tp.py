"""TP: interfaces of tensor parallelism compute the results of one process, in modules and losses."""

from conformance.assertions.fixtures import Measure
from conformance.assertions.sweeps import require_no_wrong_result
from conformance.judge.law import law
from conformance.plan.cells import Cell
from conformance.sweeps.parallel_styles import compiled_sweep, sweep

PARALLEL = "https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html"


@law(
    "TP-1",
    where="id in (tp2-fp32-default-meta, tp4-fp32-default-meta-integer-sgd-noclip-steps1, "
    "dp2-tp2-fp32-default-meta-norminf)",
    reference=PARALLEL,
    since="2.8",
    substrates=("gloo",),  # as for DT-3
)
def test_parallel_styles_and_loss_parallel_equal_one_process(measure: Measure, cell: Cell) -> None:
    """Modules with each style of `parallelize_module`, in any input and output layout, and `cross_entropy` under
    `loss_parallel` MUST have the output and the gradients of one process, or refuse on all ranks; also where sizes do
    not divide the mesh.

    Exactly on whole numbers, else within a derived bound. Refusals are recorded, without a bound.
    """
    require_no_wrong_result(measure(sweep, cell), unit="layouts")


@law(
    "TP-2",
    where="id = tp2-bf16mp-default-meta",  # of nightly, for its time
    reference="https://docs.pytorch.org/docs/stable/generated/torch.compile.html",
    since="2.11",
    substrates=("gloo",),  # as for DT-3
)
def test_compiled_parallel_styles_equal_one_process(measure: Measure, cell: Cell) -> None:
    """Compiled modules with each style of `parallelize_module` MUST have the output and the gradients of one process
    without a compiler, or refuse on all ranks.

    Judged as in TP-1, with fewer modules and sizes. The compiler's backend is `aot_eager`: graphs are captured, and run
    by the operators of eager mode.
    """
    require_no_wrong_result(measure(compiled_sweep, cell), unit="layouts")
