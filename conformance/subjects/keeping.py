"""Results of subjects that a checkout keeps, and the table that shows them: subjects by laws."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from tabulate import tabulate

from conformance.judge.verdicts import BAD, Verdict
from conformance.project import PROJECT
from conformance.subjects.cells import split_name
from conformance.subjects.laws import LAWS
from conformance.subjects.schema import NOT_JUDGED, SubjectReport, SubjectVerdict

DIRECTORY = PROJECT / "docs" / "subjects"
"""Directory of the results, one file for each subject."""

_INTRODUCTION = """# Other people's trainers

Written by `python -m conformance docs --write` from `docs/subjects/`, which `conformance judge SUBJECT --keep` writes.
Each trainer ran on the CPU ([judge_your_trainer.md](judge_your_trainer.md)). A law is
`pass` if it holds on all cells that were run; `-` where it was not judged."""


class KeptSubject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Verdicts on a subject, without the numbers."""

    subject: str
    """Name that `conformance judge` was given."""
    versions: dict[str, str]
    shims: list[str]
    laws: dict[str, dict[str, Verdict]]
    """Verdict by law and cell."""
    failures: list[str]
    """First reason of each law that does not hold, with the cell; laws with one reason share it."""
    unseen_faults: list[str]
    """Faults that no law sees; all if they were not tried."""
    duration_s: float


def keep(name: str, report: SubjectReport) -> Path:
    """Write the verdicts on a subject, and return the file."""
    laws: dict[str, dict[str, Verdict]] = {}
    failing: dict[str, SubjectVerdict] = {}
    for entry in report.verdicts:
        laws.setdefault(entry.law, {})[split_name(entry.cell)[1]] = entry.verdict
        if entry.verdict in BAD:
            failing.setdefault(entry.law, entry)
    kept = KeptSubject(
        subject=name,
        versions=report.versions,
        shims=report.shims,
        laws=laws,
        failures=_lines(failing.values()),
        unseen_faults=report.blind_to if report.faults else ["not tried"],
        duration_s=report.duration_s,
    )
    DIRECTORY.mkdir(exist_ok=True)
    file = DIRECTORY / f"{report.subject}.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    return file


def _lines(failing: Iterable[SubjectVerdict]) -> list[str]:
    """Return a line for each reason, with the laws and the cell."""
    laws: dict[tuple[str, str], list[str]] = {}
    for entry in failing:
        laws.setdefault((split_name(entry.cell)[1], entry.reason), []).append(entry.law)
    return [f"{', '.join(of_reason)} on {cell}: {reason}" for (cell, reason), of_reason in laws.items()]


def read_kept() -> dict[str, KeptSubject]:
    """Return what is kept, by the short names of subjects."""
    files = sorted(DIRECTORY.glob("*.json"), key=lambda file: file.stem)
    return {file.stem: msgspec.json.decode(file.read_bytes(), type=KeptSubject) for file in files}


def as_markdown(kept: dict[str, KeptSubject]) -> str:
    """Return the page: laws by subjects, about each subject, and what does not hold."""
    rows = [[f"`{law.id}`", *(_summary(subject, law.id) for subject in kept.values())] for law in LAWS]
    table = tabulate(rows, headers=["law", *kept], tablefmt="github", disable_numparse=True)
    about = tabulate(
        [_about(name, subject) for name, subject in kept.items()],
        headers=["subject", "command", "versions", "cells", "faults that no law sees", "shims", "takes"],
        tablefmt="github",
        disable_numparse=True,
    )
    failures = "\n\n".join(_failures(name, subject) for name, subject in kept.items() if subject.failures)
    return f"{_INTRODUCTION}\n\n{table}\n\n{about}\n\n## What does not hold\n\n{failures}\n"


def _summary(subject: KeptSubject, law: str) -> str:
    verdicts = [verdict for verdict in subject.laws.get(law, {}).values() if verdict not in NOT_JUDGED]
    if not verdicts:
        return "-"
    bad = sum(verdict in BAD for verdict in verdicts)
    return f"**fail** on {bad} of {len(verdicts)}" if bad else "pass"


def _about(name: str, subject: KeptSubject) -> Sequence[str]:
    cells = dict.fromkeys(
        cell for of_law in subject.laws.values() for cell, verdict in of_law.items() if verdict not in NOT_JUDGED
    )
    return [
        name,
        f"`conformance judge {subject.subject}`",
        ", ".join(f"{package} {version}" for package, version in subject.versions.items()),
        ", ".join(cells),
        ", ".join(subject.unseen_faults) or "none",
        ", ".join(f"`{shim}`" for shim in subject.shims) or "none",
        f"{subject.duration_s:.0f} s",
    ]


def _failures(name: str, subject: KeptSubject) -> str:
    return "\n".join([f"{name}:\n", *(f"    {failure[:300]}" for failure in subject.failures)])
