"""Exceptions that end a case, the description of a run that did not finish, and outcomes inside of a sweep.

Laws, oracles and ranks raise these exceptions; `judge.verdicts` gives the verdict that each of them means. Nothing of
pytest or torch belongs here.
"""

from typing import Literal, get_args

import msgspec

SweptOutcome = Literal["right", "refused", "wrong"]
"""Outcome of one of the calls, layouts or trainings that a sweep tries inside of a case."""
SWEPT_OUTCOMES: tuple[SweptOutcome, ...] = get_args(SweptOutcome)


def swept_metric(outcome: SweptOutcome) -> str:
    """Return the name of the metric that counts a sweep's trials of an outcome."""
    return f"trials {outcome}"


class ConformanceFailure(AssertionError):
    """Failed comparison of a law."""


class Unsupported(Exception):
    """Inability of the machine or its torch to run the case; the message has the missing and the present amount."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a run that did not finish."""

    kind: Literal["raised", "crash", "timeout", "suite-error"]
    """`suite-error`: the exception came from the suite's own code, not from the product."""
    first_rank: int
    """Rank that failed first."""
    reason: str
    """One line about the first failure."""
    details: str
    """Tracebacks, stacks and the end of the output of all ranks."""
    traceback: str = ""
    """Frames of the product and its packages where the first rank ended, for another trainer than the suite's."""
    collectives: list[str] = []
    """Last collective that each rank has issued, by rank, such as `all_reduce SUM of 64 float32`; empty if unknown."""


class CellFailed(Exception):
    """Unfinished run of a cell. Unless a rank died, every law on that cell gets the same verdict."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.reason}\n{failure.details}")
        self.failure = failure
