"""Place at which a run with taps has ended with an exception, told from the taps that its ranks have left."""

from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from conformance.bound import EXACT
from conformance.localisation.expected import ExpectedTraces
from conformance.localisation.ranks import ranks_of_mesh
from conformance.localisation.tensors import first_wrong_tensor
from conformance.localisation.traces import Trace, read_trace
from conformance.localisation.walk import ComparedStep
from conformance.outcomes import Failure
from conformance.plan.mesh import Mesh
from conformance.report.location import Location


def place_of_end(directory: Path, mesh: Mesh, failure: Failure) -> Location | None:
    """Return the first tensor that differs where backward repeats a forward pass, or the last one before the exception.

    None if the ranks have left no taps: they were killed, or raised before the first forward pass.
    """
    traces = list(_traces(directory, mesh))
    if len(traces) != mesh.world_size or not traces[failure.first_rank].taps:
        return None
    ranks = ranks_of_mesh(mesh)
    reason = failure.reason.partition("\n")[0]
    last = traces[failure.first_rank].taps[-1]
    # A repeated forward pass is compared with the first: each rank is its own oracle.
    expected = ExpectedTraces(traces=traces, within=EXACT)
    compared = ComparedStep(last.step, ranks, traces, expected)
    location = first_wrong_tensor(compared, sizes={}, collectives=[[]] * mesh.world_size)
    if location is not None:
        return replace(location, agrees="", collective=f"the run ended: {reason}", issued=None)
    is_backward = last.is_recomputed or "gradient" in last.kind or "backward" in last.kind
    return ranks.location(
        [failure.first_rank],
        family="tensor",
        stage="backward" if is_backward else "forward",
        name=last.module,
        quantity=f"{last.kind} {last.item}, the last tensor before the run ended",
        step=last.step,
        micro_batch=last.call,
        equals=reason,
        called=traces[failure.first_rank].code(last.called),
        tree={**dict.fromkeys(traces[failure.first_rank].modules, "unseen"), last.module: "wrong"},
    )


def _traces(directory: Path, mesh: Mesh) -> Iterator[Trace]:
    for rank in range(mesh.world_size):
        if (directory / f"taps{rank}.safetensors").exists():
            yield read_trace(directory, rank=rank)
