"""Places of runs that hang, from the stacks of their ranks."""

from torch.distributed import distributed_c10d

from conformance.localisation.hanging import place_of_hang
from conformance.localisation.ranks import Ranks
from conformance.outcomes import Failure
from conformance.project import PROJECT

RANKS = Ranks([{"dp_shard": rank} for rank in range(3)], [0, 1, 2])


def stack(rank: int, function: str, line: int) -> str:
    """Return the report on a rank that waits in a collective, called from this file."""
    return (
        f"--- rank {rank} hung (waiting for its peers)\nstacks of all threads of rank {rank}:\n"
        f'  File "{distributed_c10d.__file__}", line 1 in {function}\n'
        f'  File "{PROJECT / "tests/fast/localisation/test_hanging.py"}", line {line} in step\n'
    )


def failure(details: str) -> Failure:
    return Failure(kind="timeout", first_rank=0, reason="no result", details=details)


def test_the_rank_that_waits_alone_is_told_first() -> None:
    details = stack(0, "all_reduce", 1) + stack(1, "all_gather_single", 5) + stack(2, "all_reduce", 1)
    found = place_of_hang(failure(details), RANKS)
    assert found is not None
    assert (found.stage, found.quantity) == ("schedule", "all_gather_single in which ranks wait")
    assert (found.ranks, found.ranks_text) == ([1], "dp_shard rank 1 of 3")
    assert "`from conformance.localisation.hanging import place_of_hang`" in found.equals
    assert "rank 0 waits in all_reduce" in found.equals


def test_other_threads_tell_nothing() -> None:
    """A progress bar has a thread that waits in no collective."""
    other = 'Thread 0x1 (most recent call first):\n  File "/home/me/monitor.py", line 69 in run\n'
    details = "--- rank 0 hung\nstacks of all threads of rank 0:\nCurrent thread 0x2 (most recent call first):\n"
    details += f'  File "{distributed_c10d.__file__}", line 1 in all_reduce\n\n{other}'
    found = place_of_hang(failure(details), RANKS)
    assert found is not None
    assert "monitor" not in found.equals
    assert found.quantity == "all_reduce in which ranks wait"


def test_ranks_without_stacks_have_no_place() -> None:
    assert place_of_hang(failure("killed"), RANKS) is None
