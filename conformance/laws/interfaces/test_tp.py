"""TP: interfaces of tensor parallelism compute the results of one process, in modules and losses."""

from conformance.assertions.fixtures import Measure
from conformance.assertions.sweeps import require_no_wrong_result
from conformance.judge.law import law
from conformance.plan.cells import Cell
from conformance.sweeps.parallel_styles import compiled_sweep, sweep
from conformance.sweeps.style_options import sweep as option_sweep

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

    Exactly on whole numbers, else within a derived bound. Refusals are bounded as in DT-3.
    """
    require_no_wrong_result(measure(sweep, cell), unit="layouts", bounded=f"TP-1/{cell.id}")


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
    require_no_wrong_result(measure(compiled_sweep, cell), unit="layouts", bounded=f"TP-2/{cell.id}")


@law(
    "TP-3",
    where="id in (dp2-fp32-default-meta-even, dp4-fp32-default-meta)",
    reference=PARALLEL,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_options_of_parallel_styles_do_not_disturb_each_other(measure: Measure, cell: Cell) -> None:
    """Any two options of a style or of `parallelize_module`, on more than two ranks any three, MUST leave the module
    the outputs and gradients of one process in three calls of different sizes, or refuse on all ranks.

    Inputs are given in the declared layout, in another one, or as plain shards; positionally and by name.
    """
    require_no_wrong_result(measure(option_sweep, cell), unit="calls", bounded=f"TP-3/{cell.id}")
