"""Verdicts on cases, and the exit status of a session."""

from collections.abc import Container, Mapping
from enum import StrEnum

from conformance.outcomes import CellFailed, Unsupported


class Verdict(StrEnum):
    """Outcome of a case, in the order of the terminal table."""

    PASS = "pass"
    QUALITY_WARNING = "quality-warning"
    UNSUPPORTED = "unsupported"
    WAIVED = "waived"
    FAIL = "fail"
    UNEXPECTED_PASS = "unexpected-pass"
    TIMEOUT = "timeout"
    CRASH = "crash"
    ERROR = "error"
    NOT_RUN = "not-run"


# Exit status of a session; that of wrong usage comes from pytest itself.
CONFORMANT, NOT_CONFORMANT, SUITE_FAILED, USAGE, INCOMPLETE = 0, 1, 3, 4, 5

_AGAINST_THE_PRODUCT = (Verdict.FAIL, Verdict.UNEXPECTED_PASS, Verdict.TIMEOUT, Verdict.CRASH)
BAD = (*_AGAINST_THE_PRODUCT, Verdict.ERROR)
"""Verdicts on cases that have ended and that make a session fail."""
_NOTHING_RAN = (Verdict.UNSUPPORTED, Verdict.NOT_RUN)
_BY_FAILURE = {
    "raised": Verdict.FAIL,
    "crash": Verdict.CRASH,
    "timeout": Verdict.TIMEOUT,
    "suite-error": Verdict.ERROR,
}


def classify(error: BaseException) -> tuple[Verdict, str]:
    """Return the verdict on a case that an exception has ended, with a reason of one line."""
    match error:
        case CellFailed():
            return _BY_FAILURE[error.failure.kind], error.failure.reason
        case Unsupported():
            return Verdict.UNSUPPORTED, str(error)
        case AssertionError():
            return Verdict.FAIL, _first_line(error)
        case _:
            return Verdict.ERROR, f"{type(error).__name__}: {_first_line(error)}"


def exit_status(counts: Mapping[Verdict, int], *, allows: Container[str] = ("waived", "unsupported")) -> int:
    """Return 0 for conformant, 1 for not conformant, 3 if the suite failed, 5 if no case or not every case was run.

    A failure of the product decides an incomplete session: cases that were not run cannot take it back. An error of the
    suite decides a complete one: it says nothing about the product, so that an incomplete one stays without an answer.
    `allows` contains the verdicts that the profile allows, see `matrix.Profile`.
    """
    has_failed = any(counts.get(verdict) for verdict in _AGAINST_THE_PRODUCT)
    if not _is_complete(counts, allows):
        return NOT_CONFORMANT if has_failed else INCOMPLETE
    if counts.get(Verdict.ERROR):
        return SUITE_FAILED
    return NOT_CONFORMANT if has_failed else CONFORMANT


def _is_complete(counts: Mapping[Verdict, int], allows: Container[str]) -> bool:
    """Return whether all cases were run, not counting `unsupported` ones that the profile allows, and at least one."""
    if counts.get(Verdict.NOT_RUN) or (counts.get(Verdict.UNSUPPORTED) and Verdict.UNSUPPORTED not in allows):
        return False
    return sum(counts.values()) > sum(counts.get(verdict, 0) for verdict in _NOTHING_RAN)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
