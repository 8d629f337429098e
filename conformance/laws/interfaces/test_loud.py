"""LOUD: a call that differs on one rank is right or raises, and ends no worse than it did."""

from conformance.assertions import compare
from conformance.assertions.fixtures import Measure
from conformance.judge.law import law
from conformance.judge.measurements import measure as report
from conformance.plan.cells import Cell
from conformance.sweeps.loud_faults import call_with_an_odd_rank

DISTRIBUTED = "https://docs.pytorch.org/docs/stable/distributed.html"


@law(
    "LOUD-1",
    where="id in (dp2-fp32-default-meta, dp2-fp32-default-meta-seed1, dp2-tp2-fp32-default-meta-seed1)",
    reference=DISTRIBUTED,
    since="2.13",
    substrates=("gloo",),  # waiting ends by the time limit of gloo; NCCL's watchdog ends the process
)
def test_a_call_that_differs_on_one_rank_ends_no_worse_than_recorded(measure: Measure, cell: Cell) -> None:
    """A collective call of which one rank has another argument, or that one rank leaves out, MUST end no worse than
    recorded: right, raising on all ranks, with ranks that wait for others, die or raise alone, or with wrong values and
    no error.

    Wrong if a check is lost, so that ranks wait where they raised an error, or train with wrong values where they
    waited. Each call is made in fresh processes. The first cell has few of them, that of four ranks those that can
    leave a group behind while another goes on.
    """
    found = measure(call_with_an_odd_rank, cell)[0]
    for outcome in sorted({each.outcome for each in found}, key=lambda each: each.severity):
        count = sum(each.outcome is outcome for each in found)
        report(f"calls: {outcome}", count, kind="exact", unit="calls", at=f"of {len(found)} calls")
    cases = {f"{each.call}: worse": int(each.is_worse) for each in found}
    details = {f"{each.call}: worse": f"{each.outcome}, recorded {each.recorded}: {each.ends}" for each in found}
    compare.none(cases, details=details, unit="calls")
