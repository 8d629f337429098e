"""ENV: the suite's own preconditions. They are judged first; if one fails, no other verdict means anything."""

from conformance.judge.law import Probe, law
from conformance.judge.measurements import measure
from conformance.laws import compare
from conformance.plan.cells import Cell

_MIN_AVAILABLE_BYTES = 1 << 30
"""A floor for the smallest worlds, chosen, not derived: pytest and the oracles need memory besides the ranks."""
_RANK_BYTES = 300 << 20
"""A rank's peak resident set in a run of the matrix's model: 284 to 289 MiB measured on dp4 and dp2-tp2 (torch 2.13.0,
CPU), of which 55 MiB are its own; libraries are counted for each rank although they are shared."""
_MAX_CLOCK_SPREAD_S = 5.0
"""Ranks leave a barrier at once; seconds apart means that their clocks, by which failures are ordered, are not one."""


@law("ENV-1", reference="https://docs.pytorch.org/docs/stable/distributed.html")
def test_collectives_are_correct_for_every_dtype(probe: Probe, cell: Cell) -> None:
    """all_reduce, all_gather, reduce_scatter and broadcast MUST be exact on small integers in every dtype.

    Wrong if the backend is broken, an interface is misconfigured, or ranks are not who they think they are.
    """
    world = cell.world_size
    mine = [[rank + 1 + i for i in range(world)] for rank in range(world)]
    sums = [sum(column) for column in zip(*mine, strict=True)]
    for rank, facts in enumerate(probe(world)):
        expected = {
            "all_reduce": sums,
            "all_gather": [number for numbers in mine for number in numbers],
            "reduce_scatter": [sums[rank]],
            "broadcast": mine[world - 1],
        }
        for dtype, results in facts["collectives"].items():
            assert results == expected, f"rank {rank}, {dtype}: measured {results}, expected {expected}"
    measure("dtypes", len(facts["collectives"]), lower=len(facts["collectives"]), unit="dtypes with exact collectives")


@law("ENV-2", reference="https://docs.pytorch.org/docs/stable/notes/randomness.html")
def test_ranks_run_the_same_software_in_the_same_state(probe: Probe, cell: Cell) -> None:
    """All ranks MUST run the same torch with the same backend, number of threads and global state."""
    ranks = probe(cell.world_size)
    for fact in ("torch", "python", "numpy", "threads", "default_dtype", "grad_enabled", "backend"):
        values = {str(facts[fact]) for facts in ranks}
        assert len(values) == 1, f"{fact} differs between ranks: {sorted(values)}"
    assert ranks[0]["default_dtype"] == "torch.float32"
    assert ranks[0]["grad_enabled"]
    compare.count(len({facts["pid"] for facts in ranks}), name="processes", expected=len(ranks), unit="processes")


@law("ENV-3", reference="https://docs.python.org/3/library/time.html#time.monotonic")
def test_machine_has_memory_and_one_clock(probe: Probe, cell: Cell) -> None:
    """The machine MUST have memory for a run, and one monotonic clock for all ranks."""
    ranks = probe(cell.world_size)
    needed = max(_MIN_AVAILABLE_BYTES, cell.world_size * _RANK_BYTES)
    available = min(facts["available_memory_bytes"] for facts in ranks)
    measure("available memory", available, lower=needed, unit="bytes")
    assert available >= needed, f"{available} bytes of memory available, need {needed}"
    clocks = [facts["monotonic_s"] for facts in ranks]
    spread = max(clocks) - min(clocks)
    measure("clock spread", spread, lower=0.0, upper=_MAX_CLOCK_SPREAD_S, unit="s")
    assert spread <= _MAX_CLOCK_SPREAD_S, f"clocks after a barrier are {spread:.1f} s apart: {clocks}"
