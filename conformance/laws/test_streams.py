"""STREAM: how torch keeps memory alive that another stream still uses."""

from conformance.engine import compare
from conformance.engine.cells import Cell
from conformance.engine.law import Measure, Run, law
from conformance.engine.outcomes import ConformanceFailure

AVOID_RECORD_STREAMS = "https://github.com/pytorch/pytorch/pull/150398"


@law("STREAM-1", reference=AVOID_RECORD_STREAMS, since="2.8")
def test_the_variable_changes_nothing(run: Run, measure: Measure, cell: Cell) -> None:
    """Whatever TORCH_NCCL_AVOID_RECORD_STREAMS says, a run MUST be the same as without it: in every bit, in all
    collectives, and in the memory of each phase.

    From torch 2.8 on nothing but a warning depends on it. Memory is that of a simulated world: what the allocator of a
    GPU does with blocks in use by several streams is not seen here.
    """
    record, other = run(cell), run(cell.but(record_streams="unset"))
    for kind in sorted({key.rpartition("/")[0] for key in other.ranks[0].fingerprints}):
        compare.bits(record.select(f"{kind}/"), other.select(f"{kind}/"), name=kind)
    for facts, expected in zip(record.ranks, other.ranks, strict=True):
        if facts.collectives != expected.collectives:
            raise ConformanceFailure(f"rank {facts.rank} issued other collectives")
    with_it, without = (
        measure("rank_memory:step_in_simulation", one, alone=True)[0]["segments"]
        for one in (cell, cell.but(record_streams="unset"))
    )
    differences = [(a, b) for a, b in zip(with_it, without, strict=True) if a != b]
    detail = f"{differences[:1]}"
    compare.count(len(differences), name="phases with other memory", expected=0, detail=detail, unit="segments")
