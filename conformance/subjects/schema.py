"""Result of `conformance judge`: verdicts on a subject, by law and cell, as a program reads them."""

from collections.abc import Sequence

import msgspec

from conformance.judge.measurements import Measurement
from conformance.judge.verdicts import BAD, CONFORMANT, NOT_CONFORMANT, SUITE_FAILED, Verdict

NOT_JUDGED = (Verdict.UNSUPPORTED, Verdict.NOT_RUN)
"""Verdicts that say nothing of the subject."""


class SubjectVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on a subject for one law on one cell."""

    law: str
    suite_law: str
    cell: str
    """Name of the cell, with that of the subject: `fabric/dp2-fp32`."""
    verdict: Verdict
    reason: str = ""
    measured: dict[str, Measurement] = {}


class SubjectPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Dtypes and reductions of a subject on a cell, as they were measured; nothing here is right or wrong."""

    cell: str
    matmul_dtypes: list[str]
    gradient_dtypes: list[str]
    reductions: list[str]
    """Collectives that reduce gradients: kind, dtype and operation."""
    reference_dtype: str
    """Dtype of the one process that numbers are compared with."""


class FaultSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Fault that was put around the subject's step, and the laws that fail then."""

    fault: str
    cell: str
    laws: list[str]
    """Empty if no law sees the fault: the subject is blind."""


class SubjectReport(msgspec.Struct, frozen=True, kw_only=True):
    """Verdicts on a subject."""

    subject: str
    torch: str
    versions: dict[str, str]
    shims: list[str]
    """Private names that the adapter has touched."""
    verdicts: list[SubjectVerdict]
    policies: list[SubjectPolicy]
    faults: list[FaultSeen]
    duration_s: float

    @property
    def blind_to(self) -> list[str]:
        """Faults that no law sees, each with the cell."""
        return [f"{seen.fault} on {seen.cell}" for seen in self.faults if not seen.laws]

    @property
    def status(self) -> int:
        """Exit status: 0 conformant, 1 not conformant or blind, 3 if the suite failed."""
        if any(entry.verdict == Verdict.ERROR for entry in self.verdicts):
            return SUITE_FAILED
        is_bad = self.blind_to or any(entry.verdict in BAD for entry in self.verdicts)
        return NOT_CONFORMANT if is_bad or not _any_pass(self.verdicts) else CONFORMANT


def _any_pass(verdicts: Sequence[SubjectVerdict]) -> bool:
    return any(entry.verdict == Verdict.PASS for entry in verdicts)
