"""API: methods and options of FSDP2 that the reference trainer does not use."""

from conformance.assertions import compare
from conformance.assertions.fixtures import Measure
from conformance.assertions.sweeps import require_no_wrong_result
from conformance.experiments.fsdp_methods import use_methods
from conformance.experiments.fsdp_net import Wrong
from conformance.experiments.fsdp_options import use_options
from conformance.judge.law import law
from conformance.plan.cells import Cell
from conformance.sweeps.options import sweep

FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"


@law(
    "API-1",
    where="(features = 0 or features = 1 and precision in (bf16-mp, fp16-reduce)) and tp = 1 and world in (1, 2, 4, 8)",
    own_run=True,
    reference=FULLY_SHARD,
    since="2.10",
)
def test_fully_shard_options_change_no_gradient(measure: Measure, cell: Cell) -> None:
    """Gradients MUST equal those of one process in every bit, with any `shard_placement_fn`, with frozen, ignored and
    unused parameters, after an evaluation, and after a change through the state dict.
    """
    _require_nothing_wrong(measure(use_options, cell))


@law(
    "API-2",
    where="(features = 0 or features = 1 and precision in (bf16-mp, fp16-reduce)) and tp = 1 and world in (2, 4, 8)",
    own_run=True,
    reference=FULLY_SHARD,
    since="2.10",
)
def test_fsdp_module_methods_match_their_documentation(measure: Measure, cell: Cell) -> None:
    """Methods of FSDPModule MUST match their documentation: gradients are divided by the factor that is set, hooks get
    the reduced gradients, parameters are unsharded exactly as long as requested, registered methods other than forward
    can compute with them, and there are no other effects.
    """
    _require_nothing_wrong(measure(use_methods, cell))


@law(
    "API-3",
    where="features = 0 and tp = 1 and world = 4 and precision = fp32",
    reference=FULLY_SHARD,
    since="2.10",
    substrates=("gloo",),  # as for DT-3
)
def test_fsdp_options_do_not_disturb_each_other(measure: Measure, cell: Cell) -> None:
    """Any three options of `fully_shard`, of MixedPrecisionPolicy and of the methods of FSDPModule MUST leave
    parameters unchanged and give the gradients of one process, in every bit, or refuse each other on all ranks.

    Refusals are bounded as in DT-3.
    """
    require_no_wrong_result(measure(sweep, cell), unit="trainings", bounded=f"API-3/{cell.id}")


def _require_nothing_wrong(ranks: list[dict[str, Wrong]]) -> None:
    wrong = {
        use: {f"rank {rank}: {what}": n for rank, uses in enumerate(ranks) for what, n in uses[use].items() if n}
        for use in ranks[0]
    }
    details = {use: str(found) for use, found in wrong.items()}
    compare.none({use: sum(found.values()) for use, found in wrong.items()}, details=details, unit="wrong elements")
