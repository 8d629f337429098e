"""First difference of two runs that must be equal in every bit."""

from msgspec.structs import replace

from conformance.bound import EXACT
from conformance.localisation.expected import ExpectedTraces
from conformance.localisation.ranks import Ranks
from conformance.localisation.tapped_run import TappedRun
from conformance.localisation.tensors import first_wrong_tensor
from conformance.localisation.walk import ComparedStep
from conformance.report.location import Location


def first_difference(run: TappedRun, other: TappedRun) -> Location | None:
    """Return the first tapped tensor that differs between two runs of one cell; None if all are equal in every bit."""
    alone = Ranks(run.ranks.coordinates, [*run.ranks.all])  # each rank is compared with itself
    collectives = [run.collectives(rank) for rank in run.ranks.all]
    for step in run.steps:
        expected = ExpectedTraces(traces=other.traces, within=EXACT)
        compared = ComparedStep(step, alone, run.traces, expected)
        location = first_wrong_tensor(compared, sizes={}, collectives=collectives)
        if location is not None:
            return replace(
                location,
                ranks_text=run.ranks.text(location.ranks),
                equals=f"differs between two runs of the cell: {location.equals}",
            )
    return None
