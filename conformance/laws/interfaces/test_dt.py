"""DT: a DTensor behaves like the full tensor that its shards make up."""

from conformance.assertions import compare
from conformance.assertions.fixtures import Measure
from conformance.assertions.sweeps import require_no_wrong_result
from conformance.judge.law import law
from conformance.judge.measurements import measure as record
from conformance.plan.cells import Cell
from conformance.sweeps.dtensor import operate, redistribute, redistribute_weights
from conformance.sweeps.dtensor_interface import sweep as interface_sweep
from conformance.sweeps.operator_sweep import sweep

DTENSOR = "https://docs.pytorch.org/docs/stable/distributed.tensor.html"


@law("DT-1", where="features = 0 and tp = 1 and world in (2, 3, 4, 8)", reference=DTENSOR, since="2.8")
def test_dtensor_redistribute_keeps_the_tensor(measure: Measure, cell: Cell) -> None:
    """`DTensor.redistribute` between any two layouts MUST give each rank exactly the target shard, preserve
    `full_tensor()` bitwise, and do the same to gradients, for even and uneven shards.
    """
    for rank, outcome in enumerate(measure(redistribute, cell)):
        if not outcome.tried:
            raise RuntimeError(f"cell {cell.id}: nothing was redistributed")
        for what in ("local", "full", "gradient"):
            name, detail = f"{what}: wrong elements", f"rank {rank}, {outcome.tried} pairs of layouts"
            compare.count(getattr(outcome, what), name=name, expected=0, detail=detail, unit="elements")


@law("DT-2", where="features = 0 and tp = 1 and world in (2, 3, 4)", reference=DTENSOR, since="2.8")
def test_dtensor_operators_equal_those_on_full_tensors(measure: Measure, cell: Cell) -> None:
    """An operator on DTensors MUST give the result and the gradients that it gives on full tensors, in every layout, or
    refuse to compute.

    Wrong also if it refuses all layouts. How many it refuses is recorded, without a bound, as in DT-3.
    """
    ranks = measure(operate, cell)
    for name, first_outcome in ranks[0].items():
        tried = f"of {first_outcome.computed + first_outcome.refused} layouts"
        record(f"{name}: refused", first_outcome.refused, kind="exact", unit="layouts", at=tried)
        for rank, outcome in enumerate(outcomes[name] for outcomes in ranks):
            detail = f"rank {rank}, {outcome.computed} layouts, {outcome.refused} refused"
            compare.count(outcome.wrong, name=f"{name}: wrong elements", expected=0, detail=detail, unit="elements")
            refused = int(outcome.computed == 0)
            compare.count(refused, name=f"{name}: refused everywhere", expected=0, detail=detail, unit="ranks")


@law(
    "DT-3",
    where="id in (dp2-fp32-default-meta-integer, dp3-fp32-default-meta, hsdp2x2-bf16mp-default-meta,"
    " dp2-tp2-fp32-default-meta)",
    reference=DTENSOR,
    since="2.11",
    # About DTensor's logic, and not devices: trials give up waiting for a peer, which NCCL's watchdog answers by ending
    # the process, and so does the simulated device.
    substrates=("gloo",),
)
def test_dtensor_operators_on_every_layout(measure: Measure, cell: Cell) -> None:
    """An operator on DTensors MUST give the results, gradients and in-place changes that it gives on full tensors, in
    every layout, for even and uneven shards, or refuse on all ranks.

    An operator may refuse no call that a release of torch has computed before, and none with another error than was
    measured; and on two ranks communicate in no call that a release has computed from each rank's own shards.
    """
    require_no_wrong_result(measure(sweep, cell), unit="layouts", bounded=f"DT-3/{cell.id}")


@law(
    "DT-4",
    where="id in (dp2-fp32-default-meta-even, dp4-fp32-default-meta, hsdp2x2-fp32-default-meta-seed1)",
    reference=DTENSOR,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_dtensor_options_do_not_disturb_each_other(measure: Measure, cell: Cell) -> None:
    """Any two options of `redistribute`, `from_local`, `to_local`, `full_tensor`, `distribute_tensor`,
    `distribute_module` and the factories of DTensors, on more than two ranks any three, MUST give the tensors and the
    gradients that full tensors have, in the documented dtypes and layouts, or refuse on all ranks.

    Also with ranks that hold other numbers than the source rank, and where numbers show in which dtype ranks add.
    """
    require_no_wrong_result(measure(interface_sweep, cell), unit="calls", bounded=f"DT-4/{cell.id}")


@law(
    "DT-5",
    where="id in (dp2-tp2-fp32-default-meta-nosp, dp2-tp4-fp32-default-meta)",
    reference=DTENSOR,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_layouts_of_sharded_tensor_parallel_weights_keep_the_tensor(measure: Measure, cell: Cell) -> None:
    """`DTensor.redistribute` from and to the layouts of a weight that FSDP shards over tensor parallelism, and between
    others on a mesh whose dimensions are flattened, MUST give each rank exactly the target shard, and preserve
    `full_tensor()` and gradients, for even and uneven shards.

    Among them are those of such a weight that is gathered, or sharded by columns, over tensor parallelism alone. On a
    flattened mesh DTensor merges collectives over its dimensions. `distribute_tensor` MUST cut such shards, and
    operators on them compute what they do on full tensors, with its gradients, or refuse on all ranks.
    """
    require_no_wrong_result(measure(redistribute_weights, cell), unit="redistributions")
