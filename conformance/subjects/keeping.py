"""Results of subjects that a checkout keeps, one file for each; `overview` shows them."""

from pathlib import Path

import msgspec

from conformance.judge.verdicts import Verdict
from conformance.project import PROJECT
from conformance.subjects.cells import split_name
from conformance.subjects.schema import SubjectReport

DIRECTORY = PROJECT / "docs" / "subjects"
"""Directory of the results."""


class KeptSubject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Verdicts on a subject, without the numbers; cells have ids without the subject's name."""

    subject: str
    """Name that `conformance judge` was given."""
    versions: dict[str, str]
    shims: list[str]
    laws: dict[str, dict[str, Verdict]]
    """Verdict by law and cell."""
    reasons: dict[str, dict[str, str]]
    """Reason of each verdict that is not `pass`, by law and cell."""
    faults: dict[str, dict[str, list[str]]]
    """Laws that see a fault, by cell and fault; empty if faults were not tried."""
    duration_s: float


def keep(name: str, report: SubjectReport) -> Path:
    """Write the verdicts on a subject, and return the file."""
    laws: dict[str, dict[str, Verdict]] = {}
    reasons: dict[str, dict[str, str]] = {}
    for entry in report.verdicts:
        _, cell = split_name(entry.cell)
        laws.setdefault(entry.law, {})[cell] = entry.verdict
        if entry.verdict != Verdict.PASS:
            reasons.setdefault(entry.law, {})[cell] = entry.reason
    faults: dict[str, dict[str, list[str]]] = {}
    for seen in report.faults:
        faults.setdefault(split_name(seen.cell)[1], {})[seen.fault] = seen.laws
    kept = KeptSubject(
        subject=name,
        versions=report.versions,
        shims=report.shims,
        laws=laws,
        reasons=reasons,
        faults=faults,
        duration_s=report.duration_s,
    )
    DIRECTORY.mkdir(exist_ok=True)
    file = DIRECTORY / f"{report.subject}.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    return file


def read_kept() -> dict[str, KeptSubject]:
    """Return what is kept, by the short names of subjects."""
    files = sorted(DIRECTORY.glob("*.json"), key=lambda file: file.stem)
    return {file.stem: msgspec.json.decode(file.read_bytes(), type=KeptSubject) for file in files}
